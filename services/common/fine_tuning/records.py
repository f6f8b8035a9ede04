"""Records of a job that gateways and fine-tuners exchange."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

Status = Literal["validating_files", "queued", "running", "paused", "succeeded", "failed", "cancelled"]
Stage = Literal["check", "train", "publish"]  # next worked on by: a gateway, a fine-tuner, a gateway
OVER: tuple[Status, ...] = ("succeeded", "failed", "cancelled")
MOST_RANK = 64
KEPT_CHECKPOINTS = 3


class Record(BaseModel):
    """A value that is kept as JSON."""

    model_config = ConfigDict(frozen=True)


class Order(Record):
    """The part of a job that never changes."""

    id: str
    tenant: str
    model: str
    training_file: str
    validation_file: str | None
    suffix: str | None
    seed: int
    n_epochs: int | Literal["auto"]
    batch_size: int | Literal["auto"]
    learning_rate_multiplier: float | Literal["auto"]
    lora_rank: int
    quantization: Literal["none", "nf4"]
    metadata: dict[str, str] | None
    credential: str  # finds the tenant that created the job; not its key
    created_at: int
    key_id: str = ""  # the name of that key in reports

    @property
    def served_name(self) -> str:
        """The name under which the result is served."""
        return ":".join(("ft", self.model, *((self.suffix,) if self.suffix else ()), self.id.removeprefix("ftjob-")))


class JobError(Record):
    """Why a job failed."""

    code: str
    message: str
    param: str | None = None


class Event(Record):
    """An entry of a job's log, in OpenAI's shape."""

    id: str
    created_at: int
    level: Literal["info", "warn", "error"] = "info"
    message: str
    type: Literal["message", "metrics"] = "message"
    data: dict[str, Any] | None = None


class JobCheckpoint(Record):
    """An adapter that was saved while its job ran."""

    id: str
    created_at: int
    step: int
    folder: str
    metrics: dict[str, float]


def kept_checkpoints(saved: Sequence[JobCheckpoint]) -> list[JobCheckpoint]:
    """Those of a job's checkpoints that its training has left on disk, the oldest first."""
    by_folder = {one.folder: one for one in saved}  # a training that starts again may save a step twice
    return list(by_folder.values())[-KEPT_CHECKPOINTS:]


class Example(Record):
    """Tokens of a validation example, and where the trained ones begin and end (half-open ranges)."""

    tokens: list[int]
    trained: list[tuple[int, int]]


class Result(Record):
    """The result that a fine-tuner leaves for the gateway that publishes it."""

    folder: str
    train_loss: float
    valid_loss: float | None
    examples: list[Example]  # examples of the validation file, for its loss through the serving workers


class Presence(Record):
    """A fine-tuner's word about itself."""

    models: list[str]
    quantizations: list[str]
    seen_at: int = 0  # seconds since the epoch, by Redis's clock
