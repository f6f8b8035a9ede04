"""Mistral: Llama with a sliding window on every layer."""

from __future__ import annotations

from dataclasses import replace

from services.worker.model.families.config import Config
from services.worker.model.families.llama import base_spec
from services.worker.model.families.naming import Family, standard_refs
from services.worker.model.families.windows import same_window
from services.worker.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Mistral config.json. Raises ModelError."""
    spec = base_spec(config, "mistral")
    return replace(spec, layers=same_window(config, spec))


FAMILY = Family("MistralForCausalLM", "mistral", read_spec, standard_refs)
