"""LFM2: gated short convolutions between a few layers with attention."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import Any

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, Refs, TensorRef, linear_refs, standard_refs
from services.compute.model.families.windows import read_kinds
from services.compute.model.mixers import ShortConv
from services.compute.model.spec import LayerSpec, ModelSpec

_ATTENTION, _CONVOLUTION = "full_attention", "conv"
# Settings of the training, and keys that repeat others.
_UNUSED = (
    *("conv_use_xavier_init", "block_use_xavier_init", "block_mlp_init_scale", "block_out_init_scale", "theta"),
    *("conv_dim", "conv_dim_out", "block_norm_eps", "block_dim", "num_heads", "block_use_swiglu", "full_attn_idxs"),
)
NAMES = LayerNames(
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    attn_norm="operator_norm",
    mlp_norm="ffn_norm",
)


def read_layers(config: Config, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Return the layers: attention where the config names it, else a convolution. Raises ModelError."""
    attending: Any = config.raw("full_attn_idxs")
    listed = isinstance(attending, list)
    default = [_ATTENTION if index in attending else _CONVOLUTION for index in range(spec.n_layers)] if listed else None
    kinds = read_kinds(config, spec.n_layers, (_ATTENTION, _CONVOLUTION), default)
    mixer = ShortConv(spec.hidden_size, config.integer("conv_L_cache", 3), config.flag("conv_bias", False))
    convolution = LayerSpec(attends=False, mixer=mixer)
    return tuple(layer if kind == _ATTENTION else convolution for layer, kind in zip(spec.layers, kinds, strict=True))


def base(config: Config, family: str) -> ModelSpec:
    """Return the spec that LFM2 and its mixture share, before their MLPs. Raises ModelError."""
    if config.raw("tie_embedding") is not None:
        config.override("tie_word_embeddings", config.flag("tie_embedding", True))
    config.fill("rms_norm_eps", config.number("norm_eps", 1e-5))
    config.pass_over(*_UNUSED)
    config.require("use_pos_enc", True)
    spec = replace(base_spec(config, family, tied=True, theta=1e6), qk_norm="head")
    return replace(spec, layers=read_layers(config, spec))


def read_spec(config: Config) -> ModelSpec:
    """Read an LFM2 config.json. Raises ModelError."""
    if config.raw("block_ff_dim") is not None:
        config.override("intermediate_size", config.integer("block_ff_dim"))
    spec = base(config, "lfm2")
    size = spec.ffn_size
    multiplier, multiple = config.number("block_ffn_dim_multiplier", 1.0), config.integer("block_multiple_of", 256)
    if config.flag("block_auto_adjust_ff_dim", True):
        size = int(multiplier * int(2 * size / 3))
        size = ceil(size / multiple) * multiple
    return replace(spec, ffn_size=size)


def with_convolutions(spec: ModelSpec, refs: Refs) -> Refs:
    """Return `refs` with the convolutions' tensors: one fuses the gates and the values."""
    for index, layer in enumerate(spec.layers):
        if not isinstance(layer.mixer, ShortConv):
            continue
        key, module, size = f"layers.{index}.", f"model.layers.{index}.conv.", layer.mixer.size
        for place, part in enumerate("bcx"):
            rows = TensorRef(f"{module}in_proj.weight", start=place * size, n_stored=3 * size)
            refs[f"{key}conv_{part}"] = rows
            if layer.mixer.bias:
                refs[f"{key}conv_{part}.bias"] = replace(rows, name=f"{module}in_proj.bias")
        refs[f"{key}filter"] = TensorRef(f"{module}conv.weight", filtered=True)
        if layer.mixer.bias:
            refs[f"{key}filter.bias"] = TensorRef(f"{module}conv.bias")
        refs |= linear_refs(f"{key}conv_out", f"{module}out_proj", layer.mixer.bias)
    return refs


def refs(spec: ModelSpec) -> Refs:
    """Name LFM2's tensors."""
    return with_convolutions(spec, standard_refs(spec, NAMES, norm="model.embedding_norm"))


FAMILY = Family("Lfm2ForCausalLM", "lfm2", read_spec, refs)
