"""Helium: Llama with an interleaved rope."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.cohere import refs
from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Helium config.json. Raises ModelError."""
    spec = base_spec(config, "helium", norm_eps=1e-8, theta=100_000.0, attention_bias=False, mlp_bias=False)
    return replace(spec, o_bias=False)


FAMILY = Family("HeliumForCausalLM", "helium", read_spec, refs)
