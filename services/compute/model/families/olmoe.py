"""OLMoE: a mixture of experts in every layer, q and k normalised over all heads."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, read_moe
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read an OLMoE config.json. Raises ModelError."""
    config.require("clip_qkv")
    spec = base_spec(config, "olmoe", norm_eps=1e-5, attention_bias=False)
    experts = config.first_of("num_experts", "num_local_experts")
    moe = read_moe(config, experts, ffn_size=spec.ffn_size, normalise=config.flag("norm_topk_prob", False))
    return replace(spec, layers=tuple(replace(layer, moe=moe) for layer in spec.layers), qk_norm="full")


FAMILY = Family("OlmoeForCausalLM", "olmoe", read_spec, standard_refs)
