"""LFM2 MoE: LFM2 with a mixture of experts in all layers but the first ones."""

from __future__ import annotations

from dataclasses import replace

from services.compute.backends.shapes import ExpertRouting
from services.compute.model.families.config import Config
from services.compute.model.families.lfm2 import NAMES, base, with_convolutions
from services.compute.model.families.llama import read_moe
from services.compute.model.families.naming import Family, Refs, StackedNames, standard_refs
from services.compute.model.spec import ModelSpec

_NAMES = replace(
    NAMES,
    router="feed_forward.gate",
    router_correction="feed_forward.expert_bias",
    experts="feed_forward.experts",
    expert_gate="w1",
    expert_up="w3",
    expert_down="w2",
)


def read_spec(config: Config) -> ModelSpec:
    """Read an LFM2 MoE config.json. Raises ModelError."""
    spec = base(config, "lfm2_moe")
    normalise = config.flag("norm_topk_prob", True)
    moe = read_moe(config, "num_experts", ffn_size=config.integer("moe_intermediate_size"), normalise=normalise)
    corrected, scale = config.flag("use_expert_bias", True), config.number("routed_scaling_factor", 1.0)
    routing = ExpertRouting(moe.routing.n_active, normalise, "sigmoid", corrected, scale=scale)
    dense = 0 if config.raw("num_dense_layers") == 0 else config.integer("num_dense_layers", 2)
    layers = (
        layer if index < dense else replace(layer, moe=replace(moe, routing=routing))
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=tuple(layers))


def refs(spec: ModelSpec) -> Refs:
    """Name LFM2 MoE's tensors."""
    return with_convolutions(spec, standard_refs(spec, _NAMES, norm="model.embedding_norm"))


FAMILY = Family(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    read_spec,
    refs,
    stacked=StackedNames("feed_forward.gate", "feed_forward.experts"),
)
