"""Waiting for another process: spin for a bounded time, then sleep in the kernel (futex(2))."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from dataclasses import dataclass

from services.compute.ranks.segment import Segment

_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # SYS_futex, from the kernel's tables
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_LOW = 0xFFFFFFFF
_MACHINE = platform.machine()
# x86 keeps stores in order and loads in order; other machines need a barrier between payload and cursor.
_STRONGLY_ORDERED = _MACHINE == "x86_64"

if _MACHINE not in _SYSCALL_NUMBERS:
    raise ImportError(f"no futex system call number known for {_MACHINE}; known: {sorted(_SYSCALL_NUMBERS)}")


class TimeSpec(ctypes.Structure):
    """C's timespec; `of` makes one."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> TimeSpec:
        """Convert a non-negative time or duration in seconds."""
        return cls(int(seconds), int(seconds % 1 * 1e9))


# A CDLL call releases the GIL, so other threads of this process run while one sleeps here.
_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p)
_NUMBER = _SYSCALL_NUMBERS[_MACHINE]


def wake(address: int) -> None:
    """Wake every process that sleeps on the 32-bit word at `address`."""
    _syscall(_NUMBER, address, _WAKE, _ALL, None)


def sleep_while(address: int, expected: int, timeout_s: float) -> None:
    """Sleep until woken or until `timeout_s` has passed; return at once when the word is not `expected`."""
    spec = TimeSpec.of(timeout_s)
    if _syscall(_NUMBER, address, _WAIT, expected, ctypes.addressof(spec)) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to spin before sleeping, and whether to yield the core on every turn (`polite`).

    With more busy processes than cores, a process that spins without yielding delays the process that it waits for.
    """

    spin_s: float
    polite: bool = False

    @classmethod
    def choose(cls, processes: int, cores: int, spin_s: float) -> Patience:
        """Spin politely when there are more processes than cores."""
        return cls(spin_s=spin_s, polite=processes > cores)


class Counter:
    """A 64-bit counter in shared memory; one writer raises it, other processes wait for it.

    The futex word is the low half, so the counter must not grow by a multiple of 2**32 between two reads of a waiter.
    """

    def __init__(self, segment: Segment, offset: int) -> None:
        assert offset % 8 == 0
        self._cells = segment.words64
        self._index = offset // 8
        self._address = segment.address + offset
        self._keep_alive = segment

    def load(self) -> int:
        """Return the current value."""
        value = self._cells[self._index]
        if not _STRONGLY_ORDERED:
            wake(self._address)  # futex(2) implies a full barrier before it looks for sleepers
        return value

    def store(self, value: int) -> None:
        """Publish `value` and wake the waiters; a process that reads `value` sees everything written before it."""
        if not _STRONGLY_ORDERED:
            wake(self._address)
        self._cells[self._index] = value
        wake(self._address)

    def write(self, value: int) -> None:
        """Set the value without waking anything, for readers that poll and never sleep."""
        if not _STRONGLY_ORDERED:
            wake(self._address)
        self._cells[self._index] = value

    def wait_reach(self, target: int, timeout_s: float, patience: Patience) -> bool:
        """Wait until the counter is at least `target`; False after `timeout_s` seconds."""
        cells, index = self._cells, self._index
        if cells[index] >= target:
            return self.load() >= target
        started = now = time.perf_counter()
        spin_until = started + min(patience.spin_s, timeout_s)
        while now < spin_until:
            if cells[index] >= target:
                return self.load() >= target
            if patience.polite:
                os.sched_yield()
            now = time.perf_counter()
        return self._sleep_until(target, started + timeout_s)

    def _sleep_until(self, target: int, deadline: float) -> bool:
        while True:
            seen = self._cells[self._index]
            if seen >= target:
                return self.load() >= target
            remaining = deadline - time.perf_counter()
            if remaining <= 0:
                return False
            sleep_while(self._address, seen & _LOW, remaining)
