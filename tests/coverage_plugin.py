"""Has coverage see the lines of coroutines in which an error arrives (a plugin of coverage, for every process).

CPython 3.11 enters a coroutine by `throw` where what it awaits has failed, and then traces nothing of the coroutines
around the one that catches the error until they wait again. Here tasks are entered by `send`: the awaited future raises
the same error by itself.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any


def _wake_up(task: Any, _future: object) -> None:
    task._Task__step()  # noqa: SLF001
    del task  # which the traceback of its error would keep


def coverage_init(_registry: object, _options: object) -> None:
    """Called by coverage as it starts."""
    if sys.version_info < (3, 12):
        traced: Any = asyncio.tasks._PyTask  # noqa: SLF001  # asyncio's other one is written in C
        traced._Task__wakeup = _wake_up  # noqa: SLF001
        asyncio.Task = asyncio.tasks.Task = traced
