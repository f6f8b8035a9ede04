"""Messages of a training to the fine-tuner that started it: lines of JSON, each with its `kind`.

They go to stdout, or to a file on a volume that both mount.

| kind | fields |
|---|---|
| begins | steps, message |
| step | step, of, train_loss, tokens (trained so far), tokens_per_s, left_s |
| validated | step, of, valid_loss |
| saved | step, folder, metrics |
| refused | code, message, param; it ends with the status REFUSED and is not started again |
| done | a `Result` |
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

REFUSED = 42  # exit status: the job cannot be trained, and trying again would not help
STOPPED = 43  # exit status: it was asked to end before its last step


class RefusedError(Exception):
    """The job cannot be trained, by default because of the user's data; the message is for the user."""

    code, param = "invalid_training_file", "training_file"


class Voice:
    """Writes the lines. What libraries print goes to stderr from then on."""

    def __init__(self, path: Path | None = None) -> None:
        """Append to `path`, by default write to stdout."""
        self._path = path
        if path is None:
            self._out: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._out = path.open("a", buffering=1)
            self._out.write("\n")  # the training before may have been killed within a line
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, kind: str, **fields: Any) -> None:
        """Write a line; raises BrokenPipeError when stdout is closed because the fine-tuner is gone."""
        self._out.write(json.dumps({"kind": kind, **fields}) + "\n")
        if self._path is not None:
            os.fsync(self._out.fileno())  # network file systems keep it to this machine until then
