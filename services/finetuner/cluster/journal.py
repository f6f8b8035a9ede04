"""The messages of a training in a file on a volume that other machines mount."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path

from services.finetuner.runner import TrainingMessage

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Journal:
    """A file that grows by a line for each message."""

    path: Path

    def begin(self) -> None:
        """Make the file, unless it is there: network file systems remember for a while that a name was missing."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()

    def after(self, offset: int) -> list[tuple[TrainingMessage, int]]:
        """The messages behind an offset in bytes, each with the offset behind it.

        The file is opened each time, because that is when a network file system looks for what others have written.
        """
        with self.path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        messages: list[tuple[TrainingMessage, int]] = []
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            offset += len(line)
            if line.strip():
                try:
                    messages.append((json.loads(line), offset))
                except ValueError:  # its writer was killed within a line
                    log.warning("%s: half a line", self.path)
        return messages
