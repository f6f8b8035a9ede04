"""A lock that a rank holds as long as it lives, so that its death is detected at once.

The kernel reports the end of a process (pidfd, SIGCHLD, closed sockets) only after it has freed the process's memory
and closed its devices, which takes long for a large process. It releases a robust lock before that; see
pthread_mutexattr_setrobust(3).
"""

from __future__ import annotations

import ctypes
import errno
import os
import time

from services.compute.ranks.futex import TimeSpec
from services.compute.ranks.segment import Segment

LOCK_BYTES = 64  # a pthread_mutex_t has at most 48 bytes and gets a cache line of its own

_PROCESS_SHARED, _ROBUST = 1, 1  # the same in glibc and musl
_libc = ctypes.CDLL(None)  # its calls release the GIL


class LifeLock:
    """One lock in shared memory. The server calls `prepare` before any other use."""

    def __init__(self, segment: Segment, offset: int) -> None:
        assert offset % LOCK_BYTES == 0
        self._mutex = ctypes.c_void_p(segment.address + offset)
        self._segment = segment

    def prepare(self) -> None:
        """Initialize the lock as free."""
        attributes = ctypes.create_string_buffer(LOCK_BYTES)
        _check(_libc.pthread_mutexattr_init(attributes))
        _check(_libc.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_libc.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_libc.pthread_mutex_init(self._mutex, attributes))

    def hold(self) -> None:
        """Take the lock for the rest of the calling thread's life."""
        self._segment.keep()  # the kernel reads the lock when the thread ends
        _check(_libc.pthread_mutex_lock(self._mutex))

    def wait_dead(self, timeout_s: float) -> bool:
        """Block until the thread that holds the lock has died; False after `timeout_s` seconds.

        Do not call it again after True. Raises OSError when the lock was free.
        """
        deadline = TimeSpec.of(time.time() + timeout_s)
        code = _libc.pthread_mutex_timedlock(self._mutex, ctypes.byref(deadline))
        if code == errno.ETIMEDOUT:
            return False
        if code in (0, errno.EOWNERDEAD):
            _check(_libc.pthread_mutex_unlock(self._mutex))
        if code != errno.EOWNERDEAD:
            raise OSError(code, "the lock was free" if code == 0 else os.strerror(code))
        return True


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))
