"""Logs the output of torchrun and the ranks, with its levels; a traceback becomes one record."""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Mapping
from typing import Any

_LINES_KEPT = 60
_TRACEBACK = "Traceback (most recent call last):"
# torchrun's log format: a letter for the level, the date, the time, the thread, the source line.
_TORCHRUN = re.compile(r"^(?P<level>[IWEF])\d{4} [\d:.]+\s+\d+ [^\]]+\] (?P<text>.*)$")
_LEVELS = {"I": logging.INFO, "W": logging.WARNING, "E": logging.ERROR, "F": logging.CRITICAL}
_OURS = {"time", "level", "service", "logger", "message"}  # keys of the lines that JsonFormatter writes

logger = logging.getLogger(__name__)


class RankOutput:
    """Logs line after line, and keeps the last lines for the error of a failed start."""

    def __init__(self) -> None:
        self._kept: deque[str] = deque(maxlen=_LINES_KEPT)
        self._traceback: list[str] = []

    @property
    def tail(self) -> str:
        """The last lines as plain text."""
        return "\n".join(self._kept)

    def add(self, line: str) -> None:
        """Log a printed line."""
        if (record := _record(line)) is not None:
            self._flush()
            self._kept.extend(str(record[key]) for key in ("message", "error") if key in record)
            _log(record)
            return
        self._kept.append(line)
        if self._traceback:
            self._traceback.append(line)
            if line and not line.startswith(" "):  # the exception itself
                self._flush()
        elif line.startswith(_TRACEBACK):
            self._traceback.append(line)
        elif line:
            parts = _TORCHRUN.match(line)
            level, text = (_LEVELS[parts["level"]], parts["text"]) if parts else (logging.INFO, line)
            logger.log(level, "%s", text)

    def end(self) -> None:
        """Log what is held back, at the end of the output."""
        self._flush()

    def _flush(self) -> None:
        if self._traceback:
            logger.error("%s", self._traceback[-1].strip(), extra={"error": "\n".join(self._traceback)})
            self._traceback.clear()


def _record(line: str) -> Mapping[str, Any] | None:
    """The log record of a line that a rank wrote as JSON; None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and record.keys() >= _OURS else None


def _log(record: Mapping[str, Any]) -> None:
    level = logging.getLevelNamesMapping().get(str(record["level"]).upper(), logging.INFO)
    extra = {key: value for key, value in record.items() if key not in _OURS}
    logging.getLogger(str(record["logger"])).log(level, "%s", record["message"], extra=extra)
