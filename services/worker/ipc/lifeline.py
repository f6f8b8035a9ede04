"""Processes that must not outlive the one that started them."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "RYZANSTEIN_LAUNCHER_PID"


def die_with_parent() -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies, however that happens (prctl(2)).

    A parent that died before the call is noticed by its process id, if it left it in PARENT_VARIABLE.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is not None and int(expected) != os.getppid():
        raise SystemExit("the parent died before this process was ready")
