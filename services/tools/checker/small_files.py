"""Finds the files of a model; of a hub id only the small ones, without weights."""

from __future__ import annotations

from pathlib import Path

from services.common.gguf_files import split_choice
from services.compute.model.loading.hub import local_model, snapshot
from services.compute.model.spec import ModelError


def find_files(model: str) -> tuple[Path, bool]:
    """Return the folder or file of a path or hub id, and whether its weights are there. Raises ModelError."""
    if (local := local_model(model)) is not None:
        return local, True
    repository, choice = split_choice(model)
    if choice:
        raise ModelError(f"{model}: a GGUF file of a hub has to be fetched before it is checked: ryzanstein fetch")
    return snapshot(repository, weights=False), False
