"""Jamba: state-space layers (Mamba), one in eight with attention without a rope, and experts in every second."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, read_moe
from services.compute.model.families.mamba import read_mamba, with_mamba
from services.compute.model.families.naming import Family, LayerNames, Refs, StackedNames, standard_refs
from services.compute.model.spec import LayerSpec, ModelSpec

_NAMES = LayerNames(
    **{part: f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    mlp_norm="pre_ff_layernorm",
    router="feed_forward.router",
    experts="feed_forward.experts",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a Jamba config.json. Raises ModelError."""
    config.pass_over("sliding_window", "num_logits_to_keep", "rope_parameters", "rope_theta", "layers_block_type")
    config.require("sliding_window")
    config.require("mamba_inner_layernorms", True)
    config.pass_over("calc_logits_for_entire_prompt")
    config.override("rope_parameters", None)
    spec = base_spec(config, "jamba")
    mixer = replace(read_mamba(config), norms="weighted", norm_eps=spec.norm_eps)
    attends = _periodic(config, "attn_layer_period", "attn_layer_offset", 8, 4, spec.n_layers)
    mixed = _periodic(config, "expert_layer_period", "expert_layer_offset", 2, 1, spec.n_layers)
    moe = None
    if config.integer("num_experts", 16) > 1:
        moe = read_moe(config, "num_experts", ffn_size=spec.ffn_size, normalise=False)
    config.raw("num_experts_per_tok")
    layers = []
    for index in range(spec.n_layers):
        layer = LayerSpec() if index in attends else LayerSpec(attends=False, mixer=mixer)
        layers.append(replace(layer, moe=moe) if index in mixed else layer)
    return replace(spec, layers=tuple(layers))


def _periodic(config: Config, period: str, offset: str, every: int, first: int, n_layers: int) -> frozenset[int]:
    """Return the layers of which one comes in each period. Raises ModelError."""
    every = config.integer(period, every)
    first = 0 if config.raw(offset) == 0 else config.integer(offset, first)
    if first >= every:
        raise config.error(offset, f"expected less than {period} {every}, found {first}")
    return frozenset(range(first, n_layers, every))


def refs(spec: ModelSpec) -> Refs:
    """Name Jamba's tensors."""
    return with_mamba(spec, standard_refs(spec, _NAMES, norm="model.final_layernorm"), "model.layers.{}.mamba.")


FAMILY = Family(
    "JambaForCausalLM",
    "jamba",
    read_spec,
    refs,
    stacked=StackedNames("feed_forward.router", "feed_forward.experts"),
)
