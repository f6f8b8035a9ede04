"""A checkpoint that is being converted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from services.compute.model.build import open_checkpoint
from services.compute.model.families.config import Config
from services.compute.model.families.naming import Family
from services.compute.model.families.sizes import Shape, read_shapes
from services.compute.model.formats.gguf.container import GgufFile
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.registry import describe, interpret
from services.compute.model.spec import ModelError, ModelSpec


@dataclass(frozen=True, slots=True)
class Source:
    """The open checkpoint, what it says about itself, and the same model as the hub stores it."""

    path: Path
    checkpoint: Checkpoint
    config: dict[str, Any]  # config.json, without how weights are quantized
    stored_spec: ModelSpec
    hub_spec: ModelSpec
    hub_family: Family
    shapes: dict[str, Shape]
    gguf: GgufFile | None  # None: a folder of safetensors


@contextmanager
def open_source(path: Path) -> Iterator[Source]:
    """Open a folder or a GGUF file. Raises ModelError."""
    description = describe(path)
    family, spec = interpret(Config(description.config.values, path))
    if not spec.generates:
        raise ModelError(f"{path}: the body of a model, without its head, is not converted")
    if spec.has_state:
        raise ModelError(f"{path}: layers with a state are not converted; served as it is")
    with open_checkpoint(description, torch.float32) as (stored, checkpoint):
        tied = checkpoint.is_one("embed", "head")
        values = {**description.config.values, "tie_word_embeddings": tied}
        for key in ("quantization_config", "compression_config"):
            values.pop(key, None)
        yield Source(
            path,
            checkpoint,
            values,
            replace(stored, tied=tied),
            replace(spec, tied=tied, quantization=()),
            family,
            read_shapes(description.config, description.family, stored),
            description.gguf,
        )
