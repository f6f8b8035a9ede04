"""What a training process says to the fine-tuner that started it: lines of JSON on stdout, each with its `kind`.

| kind | fields |
|---|---|
| begins | steps, message |
| step | step, of, train_loss, tokens (trained so far), tokens_per_s, left_s |
| validated | step, of, valid_loss |
| saved | step, folder, metrics |
| refused | message; it ends with the status REFUSED and is not started again |
| done | a `Result` |
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

REFUSED = 42  # exit status: the user's data cannot be trained on


class RefusedError(Exception):
    """The user's data cannot be trained on; the message is for the user."""


class Voice:
    """Writes the lines. What libraries print goes to stderr from then on."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def say(self, kind: str, **fields: Any) -> None:
        """Write a line; raises BrokenPipeError when the fine-tuner is gone."""
        self._out.write(json.dumps({"kind": kind, **fields}) + "\n")
