"""The objects of OpenAI's fine-tuning API, as clients see them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from services.common.fine_tuning.records import OVER, Event, JobCheckpoint, Status
from services.common.fine_tuning.store import Job


class FineTuningJob(msgspec.Struct, kw_only=True):
    """A job. `result_metrics` and `progress` are ours."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    error: dict[str, Any] | None
    estimated_finish: int | None
    fine_tuned_model: str | None
    finished_at: int | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    model: str
    organization_id: str
    result_files: list[str]
    seed: int
    status: Status
    trained_tokens: int | None
    training_file: str
    validation_file: str | None
    metadata: dict[str, str] | None
    integrations: list[Any] = []
    user_provided_suffix: str | None
    progress: dict[str, int]
    result_metrics: dict[str, float]


def as_object(job: Job) -> FineTuningJob:
    """A job as clients see it."""
    order, numbers, over = job.order, job.numbers, job.status in OVER
    usual: dict[str, Any] = {"n_epochs": order.n_epochs, "batch_size": order.batch_size}
    usual["learning_rate_multiplier"] = order.learning_rate_multiplier
    ours = {"lora_rank": order.lora_rank, "quantization": order.quantization}
    return FineTuningJob(
        id=order.id,
        created_at=order.created_at,
        error=job.error.model_dump() if job.error else None,
        estimated_finish=numbers.get("estimated_finish") if job.status == "running" else None,
        fine_tuned_model=job.model or None,
        finished_at=numbers.get("finished_at"),
        hyperparameters=usual,
        method={"type": "supervised", "supervised": {"hyperparameters": usual | ours}},
        model=order.model,
        organization_id=order.tenant,
        result_files=[job.result_file] if job.result_file else [],
        seed=order.seed,
        status=job.status,
        trained_tokens=numbers.get("trained_tokens", 0) if over else None,
        training_file=order.training_file,
        validation_file=order.validation_file,
        metadata=order.metadata,
        user_provided_suffix=order.suffix,
        progress={name: numbers[name] for name in ("step", "steps") if name in numbers},
        result_metrics=dict(job.metrics),
    )


def event_object(event: Event) -> dict[str, Any]:
    """An event as clients see it."""
    return {"object": "fine_tuning.job.event", **event.model_dump()}


def checkpoint_name(job: Job, checkpoint: JobCheckpoint) -> str:
    """The name under which a checkpoint is served."""
    return f"{job.order.served_name}:ckpt-step-{checkpoint.step}"


def checkpoint_object(job: Job, checkpoint: JobCheckpoint) -> dict[str, Any]:
    """A checkpoint as clients see it."""
    return {
        "object": "fine_tuning.job.checkpoint",
        "id": checkpoint.id,
        "created_at": checkpoint.created_at,
        "fine_tuned_model_checkpoint": checkpoint_name(job, checkpoint),
        "fine_tuning_job_id": job.order.id,
        "metrics": {"step": checkpoint.step, **checkpoint.metrics},
        "step_number": checkpoint.step,
    }
