"""The phase of vLLM's start, from its log: a handler in each of its processes sends the lines here.

The lines are also written as JSON, like those of all our services.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from services.common.lifecycle import StartupError

_LOGGING_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
_LINE_BYTES = 4096
# The words with which a phase begins in vLLM's log, in order. A version that uses others has one phase less.
_PHASES = (
    ("Starting to load model", "loading weights"),
    ("Model loading took", "profiling"),
    ("Using cache directory", "compiling"),
    ("Dynamo bytecode transform", "compiling"),
    ("torch.compile", "profiling"),
    ("GPU KV cache size", "warming up"),
    ("Capturing CUDA graph", "capturing graphs"),
    ("Warming up", "warming up"),
)
IMPORTING = "starting processes"
WARMING = frozenset({"profiling", "compiling", "warming up", "capturing graphs"})  # the weights are loaded


class ProgressHandler(logging.Handler):
    """Sends messages to the server process; a lost one is only a phase that is not shown."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def emit(self, record: logging.LogRecord) -> None:
        """Send the message of a record."""
        try:
            self._socket.sendto(record.getMessage().encode()[:_LINE_BYTES], self._path)
        except OSError:  # the server has ended
            return


class StartClock:
    """Times the phases of vLLM's start."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="vllm-log-")
        self._path = str(Path(self._folder.name) / "lines")
        self._began: list[tuple[str, float]] = []
        self._ended = 0.0

    def configure_logging(self, level: str) -> None:
        """Set vLLM's logging for this process and its children, before vLLM is imported."""
        if _LOGGING_VARIABLE in os.environ:
            raise StartupError(f"{_LOGGING_VARIABLE}: the worker sets it itself; RYZANSTEIN_LOG_LEVEL sets the level")
        config = {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {"json": {"()": "services.common.logs.JsonFormatter", "service": "worker"}},
            "handlers": {
                "json": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stdout"},
                "progress": {"class": f"{__name__}.ProgressHandler", "path": self._path},
            },
            "loggers": {"vllm": {"handlers": ["json", "progress"], "level": level.upper(), "propagate": False}},
        }
        file = Path(self._folder.name) / "logging.json"
        file.write_text(json.dumps(config))
        os.environ[_LOGGING_VARIABLE] = str(file)

    @contextmanager
    def following(self, tell: Callable[[str], None]) -> Iterator[None]:
        """Time the phases of a start until the end of the block, and pass each to `tell` when it begins."""
        loop = asyncio.get_running_loop()
        self._began = [(IMPORTING, time.monotonic())]
        tell(IMPORTING)
        Path(self._path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lines:
            lines.setblocking(False)
            lines.bind(self._path)
            loop.add_reader(lines.fileno(), self._read, lines, tell)
            try:
                yield
            finally:
                loop.remove_reader(lines.fileno())
                self._ended = time.monotonic()

    def phases(self) -> dict[str, float]:
        """Seconds of each phase of the last start."""
        ends = [at for _, at in self._began[1:]] + [self._ended]
        seconds: dict[str, float] = {}
        for (name, began), end in zip(self._began, ends, strict=True):
            seconds[name] = seconds.get(name, 0.0) + end - began
        return seconds

    def _read(self, lines: socket.socket, tell: Callable[[str], None]) -> None:
        try:
            line = lines.recv(_LINE_BYTES).decode(errors="replace")
        except BlockingIOError:
            return
        name = next((name for words, name in _PHASES if line.startswith(words)), None)
        if name is not None and name != self._began[-1][0]:
            self._began.append((name, time.monotonic()))
            tell(name)
