"""Loads the tower of a model that sees."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

import torch

from services.compute.backends.base import ModelBackend
from services.compute.model.formats.safetensors import TensorFiles
from services.compute.model.layers.grid_vision import GridTower, load_grid
from services.compute.model.layers.vision import Stored, VisionTower, load_vision
from services.compute.model.registry import Description


def load_tower(
    model: Description, backend: ModelBackend, hidden_size: int, mean: Sequence[float], std: Sequence[float]
) -> VisionTower | GridTower:
    """Load the tower of a model that sees, for a decoder with `hidden_size`. Raises ModelError.

    `mean` and `std` of the pixels' channels, red, green and blue, from 0 to 1.
    """
    spec = model.spec.vision
    assert spec is not None, "a model that reads text only has no tower"
    with torch.inference_mode(), closing(TensorFiles(model.path, model.family.prefixes)) as files:
        stored = Stored(files, spec.tower, backend)
        return (load_vision if spec.frame_size else load_grid)(spec, stored, hidden_size, mean, std)
