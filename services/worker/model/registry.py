"""Finds the family of a checkpoint by the architecture its config.json names. Free of torch."""

from __future__ import annotations

from pathlib import Path

from services.worker.model.families import (
    gemma,
    gpt2,
    gpt_neox,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen,
)
from services.worker.model.families.config import Config
from services.worker.model.families.naming import Family
from services.worker.model.spec import ModelSpec

_ALL = (
    llama.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen.QWEN3_MOE,
    gemma.GEMMA,
    gemma.GEMMA2,
    gemma.GEMMA3,
    phi3.FAMILY,
    gpt2.FAMILY,
    gpt_neox.FAMILY,
    olmo2.FAMILY,
    granite.FAMILY,
)
FAMILIES = {family.architecture: family for family in _ALL}


def find_family(config: Config) -> Family:
    """Return the family of architectures[0]. Raises ModelError."""
    architectures = config.raw("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise config.error("architectures", f"expected a list of one name, found {architectures!r}")
    if architectures[0] not in FAMILIES:
        raise config.error("architectures", f"{architectures[0]!r} is not implemented; known: {', '.join(FAMILIES)}")
    return FAMILIES[architectures[0]]


def read_spec(path: Path) -> ModelSpec:
    """Return the spec of the checkpoint folder `path`. Raises ModelError naming the file and the key."""
    config = Config.load(path)
    spec = find_family(config).read_spec(config)
    config.finish()
    return spec
