"""A tool as a program of its own: its argument is a request in JSON, and it writes a line of JSON for each step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from services.compute.model.spec import ModelError

Progress = Callable[[str, int, int], None]  # the phase, and its steps: done and all


def run(tool: Callable[[dict[str, Any], Progress], str | None]) -> int:
    """Run a tool, which may return a note about its result; returns the exit status.

    Writes {"phase", "done", "of"}, a {"note"}, or {"error"} before it ends with status 1.
    """
    try:
        note = tool(json.loads(sys.argv[1]), lambda phase, done, of: _write(phase=phase, done=done, of=of))
    except ModelError as error:
        _write(error=str(error))
        return 1
    if note:
        _write(note=note)
    return 0


def _write(**line: object) -> None:
    print(json.dumps(line), flush=True)  # noqa: T201
