"""One supervised process."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

_PR_SET_PDEATHSIG = 1
_PROBE_EVERY_S = 0.1

Probe = Callable[[], Awaitable[bool]]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: its command, its probes of readiness and liveness, and the grace for it to stop."""

    name: str
    command: tuple[str, ...]
    address: str
    ready: Probe
    alive: Probe
    env: dict[str, str] = field(default_factory=dict)
    stop_s: float = 5.0


SpecT = TypeVar("SpecT", bound=ProcessSpec)


class ProcessEndedError(Exception):
    """A process ended before it was ready; the message contains its last error."""


class ManagedProcess(Generic[SpecT]):
    """Starts the process of a :class:`ProcessSpec`, waits until it is ready, and ends it with its children."""

    def __init__(self, spec: SpecT, log_file: Path | None = None) -> None:
        """`log_file`: of its output; None: that of this process."""
        self.spec = spec
        self.log_file = log_file
        self.ready_after_s: float | None = None
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    async def start(self) -> None:
        """Start the process in its own session, so that Ctrl-C reaches only the supervisor."""
        with self.log_file.open("ab") if self.log_file else contextlib.nullcontext() as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.command,
                env={**os.environ, **self.spec.env},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT if log else None,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    async def wait_ready(self) -> None:
        """Return once the process is ready; raises :class:`ProcessEndedError` if it ends instead."""
        started = time.monotonic()
        ended = asyncio.create_task(self.wait())
        try:
            while not await self.spec.ready():
                if ended.done():
                    raise ProcessEndedError(f"{self.spec.name} ended with status {ended.result()}: {self.last_error()}")
                await asyncio.sleep(_PROBE_EVERY_S)
        finally:
            ended.cancel()
        self.ready_after_s = time.monotonic() - started

    async def wait(self) -> int:
        """Wait for the exit status of the process; negative for a signal."""
        assert self._process is not None
        return await self._process.wait()

    async def kill(self) -> None:
        """Send SIGKILL to the whole session, which ends even a stopped process."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def stop(self) -> None:
        """Send SIGTERM; after the grace time, send SIGKILL to the whole session."""
        if self._process is None or self._process.returncode is not None:
            return
        self._process.terminate()
        try:
            async with asyncio.timeout(self.spec.stop_s):
                await self._process.wait()
        except TimeoutError:
            await self.kill()

    def last_error(self) -> str:
        """The last error in the process's log, else the last warning, else the last line."""
        if self.log_file is None:
            return "its output is above"
        lines = self.log_file.read_text(errors="replace").splitlines() if self.log_file.exists() else []
        records = [_record(line) for line in reversed(lines)]
        for levels in (("error", "critical"), ("warning",)):
            for record in records:
                if record.get("level") in levels:
                    return str(record["message"])
        return str(records[0]["message"]) if records else "it logged nothing"


def _record(line: str) -> dict[str, object]:
    """Parse a line of a log. A line that is not JSON becomes a message without a level."""
    with contextlib.suppress(json.JSONDecodeError):
        record = json.loads(line)
        if isinstance(record, dict) and "message" in record:
            return record
    return {"message": line}


def _end_with_parent() -> None:
    """Run in the child before exec: the kernel ends the child if the supervisor is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
