"""Granite: Llama with multipliers on embeddings, attention, residual stream and logits."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import LayerSpec, ModelSpec, SumFactors


def scaled_sums(layers: tuple[LayerSpec, ...], scale: float) -> tuple[LayerSpec, ...]:
    """Return the layers with `scale` as the factor of the results of attention and MLP."""
    factors = SumFactors(beta=scale)
    return tuple(replace(layer, mixing_sum=factors, mlp_sum=factors) for layer in layers)


def read_granite(config: Config, family: str, *, mlp_bias: bool | None = None) -> ModelSpec:
    """Return the spec with Granite's multipliers; `mlp_bias` as in `base_spec`. Raises ModelError."""
    spec = base_spec(config, family, attention_bias=False, mlp_bias=mlp_bias)
    return replace(
        spec,
        embedding_scale=config.number("embedding_multiplier"),
        attention_scale=config.number("attention_multiplier"),
        layers=scaled_sums(spec.layers, config.number("residual_multiplier")),
        logit_scale=1 / config.number("logits_scaling"),
    )


def read_spec(config: Config) -> ModelSpec:
    """Read a Granite config.json. Raises ModelError."""
    return read_granite(config, "granite", mlp_bias=False)


FAMILY = Family("GraniteForCausalLM", "granite", read_spec, standard_refs)
