"""Checkpoints of a job: an adapter as PEFT saves it, and the optimizer's state; each is whole or not there."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

from services.common.fine_tuning.records import KEPT_CHECKPOINTS

_STATE = "training.pt"


@dataclass(frozen=True, slots=True)
class TrainingCheckpoint:
    """A state after a number of steps."""

    folder: Path
    step: int

    def state(self) -> dict[str, Any]:
        """The optimizer's state and the tokens trained."""
        state: dict[str, Any] = torch.load(self.folder / _STATE, weights_only=True)
        return state


class Checkpoints:
    """The checkpoints in a job's folder; the last few are kept, the optimizer's state with the last one only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoints"

    def last(self) -> TrainingCheckpoint | None:
        """The one to resume from."""
        whole = [one for one in self._all() if (one.folder / _STATE).exists()]
        return whole[-1] if whole else None

    def save(self, model: PeftModel, step: int, state: dict[str, Any]) -> Path:
        """Write a checkpoint; returns its folder."""
        folder = self._folder / f"step-{step}"
        unfinished = self._folder / f".step-{step}"
        shutil.rmtree(unfinished, ignore_errors=True)
        save_adapter(model, unfinished)
        torch.save(state, unfinished / _STATE)
        _sync(unfinished)
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        *older, _ = self._all()
        for one in older:
            (one.folder / _STATE).unlink(missing_ok=True)
        for one in older[: 1 - KEPT_CHECKPOINTS]:
            shutil.rmtree(one.folder)
        return folder

    def _all(self) -> list[TrainingCheckpoint]:
        checkpoints = [
            TrainingCheckpoint(path, int(path.name.removeprefix("step-"))) for path in self._folder.glob("step-*")
        ]
        return sorted(checkpoints, key=lambda one: one.step)


def save_adapter(model: PeftModel, folder: Path) -> None:
    """Write the adapter alone, as PEFT does."""
    model.save_pretrained(str(folder), save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)  # a form to fill in
    permissions = (folder / CONFIG_NAME).stat().st_mode & 0o777
    (folder / SAFETENSORS_WEIGHTS_NAME).chmod(permissions)  # the library permits its owner alone


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
