"""Interfaces of runners, which run trainings for jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from services.finetuner.settings import FinetunerSettings

TrainingMessage = dict[str, Any]  # a message of the training process, described in `training.messages`


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """A job's training, from its last checkpoint on."""

    member: str  # the job, as it appears in Redis keys
    job_id: str
    folder: Path  # the job's: its files and checkpoints
    source: str  # path of the base: a folder of safetensors, or a GGUF file
    offset: str = ""  # `TrainingRun.offset` of the previous fine-tuner

    def arguments(self, settings: FinetunerSettings) -> list[str]:
        """The command line of the training process, without the file for its messages."""
        limits = (
            settings.finetuner_checkpoint_s,
            settings.finetuner_max_tokens,
            settings.finetuner_threads,
            settings.finetuner_nice,
        )
        return [str(self.folder), self.source, *map(str, limits)]


@dataclass(frozen=True, slots=True)
class TrainingOutcome:
    """How a training ended."""

    status: int  # exit status of its process
    reason: str  # in words
    counts: bool = True  # as an attempt of the job; False if the training was ended from outside


class NotStartedError(Exception):
    """A training cannot be started, and trying again would not help; the message is for the user."""


class TrainingRun(Protocol):
    """A training that runs."""

    @property
    def offset(self) -> str:
        """The position behind the last returned message, where another fine-tuner continues; empty if none can."""

    def messages(self) -> AsyncIterator[TrainingMessage]:
        """Yield the messages of the training until it ends. Raises :class:`NotStartedError`."""

    def stop(self) -> None:
        """Ask the training to write a checkpoint and end; may be called again."""

    async def outcome(self) -> TrainingOutcome:
        """Return how the training ended; call it after the last message."""


class TrainingRunner(Protocol):
    """Starts trainings."""

    @property
    def outlives(self) -> bool:
        """Whether a training continues when its fine-tuner ends."""

    def start(self, task: TrainingTask) -> AbstractAsyncContextManager[TrainingRun]:
        """Start a training. Leaving the context ends it, unless it outlives the fine-tuner."""

    async def sweep(self, wanted: Callable[[str], Awaitable[bool]]) -> None:
        """End the trainings of unwanted jobs, which `TrainingTask.member` names."""
