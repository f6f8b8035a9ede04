"""Ends a process together with its parent."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "RYZANSTEIN_LAUNCHER_PID"


def die_with_parent() -> None:
    """Have the kernel kill this process (SIGKILL) when its parent dies, however that happens (prctl(2)).

    When PARENT_VARIABLE holds the parent's process id, a parent that died before the call is detected as well.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # fails only for an invalid signal
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is not None and int(expected) != os.getppid():
        raise SystemExit("the parent died before this process was ready")
