"""Qwen 2 (biased q, k, v), Qwen 3 (normalised q and k), and both with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec, read_moe
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import ModelSpec

_ONE_SHARED = LayerNames(shared="mlp.shared_expert")


def read_qwen2(config: Config) -> ModelSpec:
    """Read a Qwen 2 config.json. Raises ModelError."""
    config.require("qkv_bias", True)
    config.require("attention_bias", True)  # biases of q, k and v
    return _with_windows(config, replace(base_spec(config, "qwen2"), qkv_bias=True))


def read_qwen3(config: Config) -> ModelSpec:
    """Read a Qwen 3 config.json. Raises ModelError."""
    return _with_windows(config, _qwen3(config, "qwen3"))


def read_qwen2_moe(config: Config) -> ModelSpec:
    """Read a Qwen 2 MoE (Qwen 1.5 MoE) config.json, with an expert that all rows share. Raises ModelError."""
    spec = replace(base_spec(config, "qwen2_moe"), qkv_bias=config.flag("qkv_bias", True))
    return with_experts(config, spec, shared_size=config.integer("shared_expert_intermediate_size"), shared_gate=True)


def read_qwen3_moe(config: Config) -> ModelSpec:
    """Read a Qwen 3 MoE config.json. Raises ModelError."""
    return with_experts(config, _qwen3(config, "qwen3_moe"))


def with_experts(config: Config, spec: ModelSpec, **shared: Any) -> ModelSpec:
    """Return `spec` with experts in the layers that the config names; `shared` are fields of the mixture."""
    config.require("use_sliding_window", False)
    config.raw("sliding_window")
    config.raw("max_window_layers")
    experts = "num_experts" if config.raw("num_experts") is not None else "num_local_experts"
    ffn_size, normalise = config.integer("moe_intermediate_size"), config.flag("norm_topk_prob", False)
    moe = replace(read_moe(config, experts, ffn_size=ffn_size, normalise=normalise), **shared)
    step, dense = config.integer("decoder_sparse_step", 1), config.raw("mlp_only_layers") or []
    if not isinstance(dense, list) or any(type(index) is not int for index in dense):
        raise config.error("mlp_only_layers", f"expected a list of layers, found {dense!r}")
    layers = tuple(
        layer if index in dense or (index + 1) % step else replace(layer, moe=moe)
        for index, layer in enumerate(spec.layers)
    )
    return replace(spec, layers=layers)


def _qwen3(config: Config, family: str) -> ModelSpec:
    config.require("use_qk_norm", True)
    return replace(base_spec(config, family, attention_bias=False), qk_norm="head")


def _with_windows(config: Config, spec: ModelSpec) -> ModelSpec:
    """Set the window of the layers from max_window_layers on, if the config enables it."""
    slides = config.flag("use_sliding_window", False)
    first = config.integer("max_window_layers", spec.n_layers) if slides else spec.n_layers
    config.raw("max_window_layers")
    default = [SLIDING if index >= first else FULL for index in range(spec.n_layers)]
    kinds = read_layer_types(config, spec.n_layers, default)
    return replace(spec, layers=with_windows(config, spec, kinds))


def qwen2_moe_refs(spec: ModelSpec) -> Refs:
    """Name Qwen 2 MoE's tensors."""
    return standard_refs(spec, _ONE_SHARED)


QWEN2 = Family("Qwen2ForCausalLM", "qwen2", read_qwen2, standard_refs)
QWEN2_MOE = Family("Qwen2MoeForCausalLM", "qwen2_moe", read_qwen2_moe, qwen2_moe_refs)
QWEN3 = Family("Qwen3ForCausalLM", "qwen3", read_qwen3, standard_refs)
QWEN3_MOE = Family("Qwen3MoeForCausalLM", "qwen3_moe", read_qwen3_moe, standard_refs)
