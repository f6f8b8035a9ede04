"""Trainings as processes of the fine-tuner: they end with it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.lifeline import PARENT_VARIABLE
from services.finetuner.runner import TrainingMessage, TrainingOutcome, TrainingTask
from services.finetuner.settings import FinetunerSettings


@dataclass(frozen=True, slots=True)
class ChildRun:
    """See :class:`TrainingRun`."""

    process: Process
    log: Path

    @property
    def offset(self) -> str:
        """See :class:`TrainingRun`."""
        return ""

    async def messages(self) -> AsyncIterator[TrainingMessage]:
        """See :class:`TrainingRun`."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            yield json.loads(line)

    def stop(self) -> None:
        """See :class:`TrainingRun`."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)

    async def outcome(self) -> TrainingOutcome:
        """See :class:`TrainingRun`."""
        return TrainingOutcome(await self.process.wait(), _last_line(self.log))


@dataclass(frozen=True, slots=True)
class ChildRunner:
    """See :class:`TrainingRunner`."""

    settings: FinetunerSettings

    @property
    def outlives(self) -> bool:
        """See :class:`TrainingRunner`."""
        return False

    @asynccontextmanager
    async def start(self, task: TrainingTask) -> AsyncIterator[ChildRun]:
        """See :class:`TrainingRunner`."""
        log = task.folder / "training.log"
        command = (sys.executable, "-m", "services.finetuner.training", *task.arguments(self.settings))
        with log.open("ab") as errors:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=PIPE,
                stderr=errors,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
            )
        try:
            yield ChildRun(process, log)
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it has ended, unless the claim is lost
            await process.wait()

    async def sweep(self, wanted: Callable[[str], Awaitable[bool]]) -> None:
        """See :class:`TrainingRunner`: none is left."""


def _last_line(path: Path) -> str:
    lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
