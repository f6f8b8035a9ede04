"""Mixtral: Mistral with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, read_moe
from services.compute.model.families.naming import Family, LayerNames, standard_refs
from services.compute.model.families.windows import same_window
from services.compute.model.spec import ModelSpec

NAMES = LayerNames(
    router="block_sparse_moe.gate",
    experts="block_sparse_moe.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a Mixtral config.json. Raises ModelError."""
    spec = base_spec(config, "mixtral", norm_eps=1e-5, theta=1e6)
    moe = read_moe(config, "num_local_experts", ffn_size=spec.ffn_size, normalise=True)
    return replace(spec, layers=tuple(replace(layer, moe=moe) for layer in same_window(config, spec)))


FAMILY = Family("MixtralForCausalLM", "mixtral", read_spec, partial(standard_refs, names=NAMES))
