"""Granite: Llama with multipliers on embeddings, attention, residual stream and logits."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_multipliers(config: Config, spec: ModelSpec) -> ModelSpec:
    """Return `spec` with Granite's multipliers and biases. Raises ModelError."""
    bias = config.flag("attention_bias", False)
    return replace(
        spec,
        qkv_bias=bias,
        o_bias=bias,
        embedding_scale=config.number("embedding_multiplier"),
        attention_scale=config.number("attention_multiplier"),
        residual_scale=config.number("residual_multiplier"),
        logit_scale=1 / config.number("logits_scaling"),
    )


def read_spec(config: Config) -> ModelSpec:
    """Read a Granite config.json. Raises ModelError."""
    spec = read_multipliers(config, base_spec(config, "granite"))
    return replace(spec, mlp_bias=config.flag("mlp_bias", False))


FAMILY = Family("GraniteForCausalLM", "granite", read_spec, standard_refs)
