"""vLLM's tasks for the prompts of a model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from services.common.lifecycle import StartupError
from services.worker.engine.state import EngineModel

# The names are vLLM's. `classify` gives a number for each label; gateways make scores of them.
Task = Literal["generate", "embed", "classify"]


def task_of(model: EngineModel) -> Task:
    """The task of all requests to a model."""
    if model.generates:
        return "generate"
    return "embed" if model.classes is None else "classify"


def check_task(model: EngineModel, known: Iterable[str]) -> None:
    """Raise StartupError if the task is not among those that vLLM knows for the model."""
    task, names = task_of(model), sorted(known)
    if task not in names:
        raise StartupError(
            f"RYZANSTEIN_MODEL: vLLM does not {task} with {model.architecture}; its tasks are {', '.join(names)}: "
            "use a model that generates, or that embeds or classifies whole texts"
        )
