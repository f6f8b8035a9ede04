"""Settings of a pod with several models: those of a worker, and what each model has of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from services.common.gguf_files import model_name
from services.common.settings import PREFIX, ServiceSettings
from services.worker.settings import WorkerSettings

# Settings of the whole pod, which no model has of its own.
_POD_S = {
    *ServiceSettings.model_fields,
    *("worker_id", "worker_port", "memory_host", "max_awake", "nodes", "node_service", "drain_s"),
}
OF_A_MODEL = sorted(WorkerSettings.model_fields.keys() - _POD_S)


class PoolSettings(WorkerSettings):
    """Settings of one pod's workers, each a server of its own with a model of its own."""

    model: str = Field("", description="Each model has its own")
    worker_port: int = Field(50054, ge=1, le=65000, description="gRPC port of the first worker; others follow it")
    metrics_port: int = Field(
        9100,
        ge=1,
        le=65000,
        description="The supervisor's port of /metrics, /livez and /readyz; the workers' follow it",
    )
    models: list[dict[str, Any]] = Field(
        min_length=1,
        max_length=32,
        description='Settings of each worker: a JSON list such as [{"model": "/models/a", "pinned": true}]',
    )

    @field_validator("models")
    @classmethod
    def _models(cls, models: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for index, own in enumerate(models):
            if wrong := sorted(own.keys() - set(OF_A_MODEL)):
                raise ValueError(f"[{index}].{wrong[0]}: not a setting of one model: {', '.join(OF_A_MODEL)}")
            if not own.get("model"):
                raise ValueError(f"[{index}].model: is not set")
        return models

    @model_validator(mode="after")
    def _each_is_a_worker(self) -> Self:
        workers = self.workers()
        names = [each.served_model_name or model_name(each.model) or each.model.rpartition("/")[2] for each in workers]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"{PREFIX}MODELS: several models are called {twice[0]}; give each a served_model_name")
        pinned = sum(each.pinned for each in workers)
        if self.max_awake and pinned > self.max_awake - (pinned < len(workers)):
            limit = f"{PREFIX}MAX_AWAKE {self.max_awake}"
            raise ValueError(f"{PREFIX}MODELS: with {limit}, {pinned} pinned models leave no room for others")
        return self

    def workers(self) -> tuple[WorkerSettings, ...]:
        """The settings of each worker. Raises ValueError, which names the model."""
        common = {name: getattr(self, name) for name in self.model_fields_set if name in WorkerSettings.model_fields}
        workers = []
        for index, own in enumerate(self.models):
            of_pod = {
                "worker_id": f"{self.worker_id}.{index}",
                "worker_port": self.worker_port + index,
                "metrics_port": self.metrics_port + 1 + index,
                "memory_host": self.worker_id,
            }
            try:
                workers.append(WorkerSettings.model_validate(common | own | of_pod))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, (f"{PREFIX}MODELS[{index}]", *first["loc"])))
                raise ValueError(f"{where}: {first['msg']}") from None
        return tuple(workers)

    def environments(self) -> Iterator[dict[str, str]]:
        """The environment of each worker, besides that of this process."""
        for own, worker in zip(self.models, self.workers(), strict=True):
            names = {*own, "worker_id", "worker_port", "metrics_port", "memory_host"}
            yield {f"{PREFIX}{name.upper()}": _text(getattr(worker, name)) for name in sorted(names)}


def _text(value: object) -> str:
    """A setting's value in an environment: lists have commas, objects are JSON."""
    if isinstance(value, dict):
        return json.dumps(value)
    return ",".join(value) if isinstance(value, tuple) else str(value)
