"""Mixtures of experts as DeepSeek 3 spells them: experts in groups, a corrected choice, shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.compute.backends.shapes import ExpertRouting
from services.compute.model.families.config import Config
from services.compute.model.families.llama import read_moe
from services.compute.model.spec import LayerSpec, ModelSpec

# Settings of the training, and of programs that divide experts among machines.
_UNUSED = ("seq_aux", "aux_loss_alpha", "ep_size", "router_aux_loss_coef", "norm_topk_eps")


def with_grouped_experts(config: Config, spec: ModelSpec, *, dense: int, normalise: bool) -> tuple[LayerSpec, ...]:
    """Return the layers with sigmoid routing by groups. Raises ModelError.

    `dense` and `normalise` are the defaults of first_k_dense_replace and norm_topk_prob.
    """
    return with_experts(config, spec, read_grouped_routing(config, normalise=normalise), dense=dense)


def read_grouped_routing(config: Config, *, normalise: bool) -> ExpertRouting:
    """Return sigmoid routing by groups; `normalise` is the default of norm_topk_prob. Raises ModelError."""
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    n_groups, n_kept = read_groups(config)
    normalise = config.flag("norm_topk_prob", normalise)
    n_active, scale = config.integer("num_experts_per_tok"), config.number("routed_scaling_factor", 1.0)
    if n_groups > 1 and config.integer("n_routed_experts") < 2 * n_groups:
        raise config.error("n_group", f"expected groups of two experts and more, found {n_groups}")
    return ExpertRouting(n_active, normalise, "sigmoid", True, n_groups, n_kept, "top2", scale)


def read_groups(config: Config) -> tuple[int, int]:
    """Return the number of groups and of those that are kept. Raises ModelError."""
    n_experts = config.integer("n_routed_experts")
    n_groups, n_kept = config.integer("n_group", 1), config.integer("topk_group", 1)
    if n_experts % n_groups:
        raise config.error("n_group", f"expected a divisor of n_routed_experts {n_experts}, found {n_groups}")
    if n_kept > n_groups:
        raise config.error("topk_group", f"expected n_group {n_groups} at most, found {n_kept}")
    if config.integer("num_experts_per_tok") > n_kept * (n_experts // n_groups):
        raise config.error("num_experts_per_tok", "expected at most the experts of topk_group groups")
    return n_groups, n_kept


def with_experts(config: Config, spec: ModelSpec, routing: ExpertRouting, *, dense: int) -> tuple[LayerSpec, ...]:
    """Return the layers, with experts from layer first_k_dense_replace on. Raises ModelError."""
    config.require("moe_layer_freq", 1)
    config.pass_over(*_UNUSED)
    ffn_size = config.integer("moe_intermediate_size")
    shared: Any = config.raw("n_shared_experts")
    shared_size = ffn_size * config.integer("n_shared_experts") if shared else 0
    moe = read_moe(config, "n_routed_experts", ffn_size=ffn_size, normalise=routing.normalise)
    moe = replace(moe, routing=routing, shared_size=shared_size)
    first = config.raw("first_k_dense_replace")
    first = dense if first is None else first if first == 0 else config.integer("first_k_dense_replace")
    return tuple(replace(layer, moe=moe) if index >= first else layer for index, layer in enumerate(spec.layers))
