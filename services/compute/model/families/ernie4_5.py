"""ERNIE 4.5 (dense): Llama with an interleaved rope."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.cohere import refs
from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read an ERNIE 4.5 config.json. Raises ModelError."""
    config.require("compression_ratio", 1)
    bias = config.flag("use_bias", False)
    spec = base_spec(config, "ernie4_5", tied=True, norm_eps=1e-5, theta=500_000.0)
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=bias)


FAMILY = Family("Ernie4_5ForCausalLM", "ernie4_5", read_spec, refs, base="Ernie4_5Model")
