"""Waiting for another process: spin for a bounded time, then sleep in the kernel (futex(2))."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time
from dataclasses import dataclass

from services.worker.ipc.segment import Segment

_SYSCALL_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # SYS_futex, from the kernel's tables
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_LOW = 0xFFFFFFFF
_MACHINE = platform.machine()
# x86 keeps stores in order and loads in order; elsewhere a barrier must stand between payload and cursor.
_STRONGLY_ORDERED = _MACHINE == "x86_64"

if _MACHINE not in _SYSCALL_NUMBERS:
    raise ImportError(f"no futex system call number known for {_MACHINE}; known: {sorted(_SYSCALL_NUMBERS)}")


class TimeSpec(ctypes.Structure):
    """C's timespec, made by `of`."""

    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))

    @classmethod
    def of(cls, seconds: float) -> TimeSpec:
        """From a time or a duration that is not negative."""
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
    """Sleep until woken, `timeout_s` passed, or at once when the word is no longer `expected`."""
    spec = TimeSpec.of(timeout_s)
    if _syscall(_NUMBER, address, _WAIT, expected, ctypes.addressof(spec)) == 0:
        return
    code = ctypes.get_errno()
    if code not in (errno.EAGAIN, errno.ETIMEDOUT, errno.EINTR):
        raise OSError(code, os.strerror(code))


@dataclass(frozen=True, slots=True)
class Patience:
    """How long to burn a core before sleeping, and whether to offer the core to others meanwhile.

    With more busy processes than cores a spinning process delays the very one it waits for; `polite` spinning
    gives up the core on every turn.
    """

    spin_s: float
    polite: bool = False

    @classmethod
    def choose(cls, processes: int, cores: int, spin_s: float) -> Patience:
        """Spin only as far as there are cores for it: politely when they are all taken, else freely."""
        return cls(spin_s=spin_s, polite=processes > cores)


class Counter:
    """A 64-bit counter in shared memory with one writer that only ever raises it; others wait for it.

    The futex word is the low half, so raises between two looks must not be a multiple of 2**32.
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
        """Publish `value`: everything written before is visible to whoever sees it. Wakes the waiters."""
        if not _STRONGLY_ORDERED:
            wake(self._address)
        self._cells[self._index] = value
        wake(self._address)

    def write(self, value: int) -> None:
        """Set the value for readers that poll and never sleep; nobody is woken."""
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
