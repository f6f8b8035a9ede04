"""Where trainings run: what a job asks of a runner, whatever it is."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.finetuner.settings import FinetunerSettings

Word = dict[str, Any]  # as `training.words` describes them


@dataclass(frozen=True, slots=True)
class Task:
    """A job's training, from its last checkpoint on."""

    member: str  # the job, as it appears in Redis keys
    job_id: str
    folder: Path  # the job's: its files and checkpoints
    source: str  # of the base: a folder of safetensors, or a GGUF file
    heard: str = ""  # `Run.heard` of the fine-tuner that had the job before

    def arguments(self, settings: FinetunerSettings) -> list[str]:
        """The command line of the training process, without the file for its words."""
        limits = (
            settings.finetuner_checkpoint_s,
            settings.finetuner_max_tokens,
            settings.finetuner_threads,
            settings.finetuner_nice,
        )
        return [str(self.folder), self.source, *map(str, limits)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a training ended."""

    status: int  # of its process
    said: str  # why, in words
    counts: bool = True  # as one of the attempts that a job has; not if something else took its place away


class NotStartedError(Exception):
    """A training cannot be started, and trying again would not help; the message is for the user."""


class Run(Protocol):
    """A training that was started, or found running."""

    @property
    def heard(self) -> str:
        """Which words were returned, for a fine-tuner that goes on with this training; empty if none can."""

    def words(self) -> AsyncIterator[Word]:
        """What it says, until it has ended. Raises :class:`NotStartedError`."""

    def stop(self) -> None:
        """Have it write a checkpoint and end; may be called again."""

    async def outcome(self) -> Outcome:
        """How it ended; to be asked when there are no more words."""


class Runner(Protocol):
    """Starts trainings."""

    @property
    def outlives(self) -> bool:
        """Whether a training goes on when its fine-tuner ends."""

    def start(self, task: Task) -> AbstractAsyncContextManager[Run]:
        """Start a training. It does not run any more when the context is left, unless it outlives the fine-tuner."""

    async def sweep(self, wanted: Callable[[str], Awaitable[bool]]) -> None:
        """End the trainings whose job, as `Task.member` names it, is not wanted any more."""
