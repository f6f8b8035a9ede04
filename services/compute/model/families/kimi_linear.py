"""Kimi Linear: delta rules with a decay for each number of a key, latent attention without a rope, experts."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.deepseek import latent_refs, with_latents
from services.compute.model.families.mixtures import with_grouped_experts
from services.compute.model.families.naming import (
    Family,
    LayerNames,
    Refs,
    StackedNames,
    TensorRef,
    linear_refs,
    standard_refs,
)
from services.compute.model.families.windows import read_kinds
from services.compute.model.mixers import DeltaNet
from services.compute.model.spec import LayerSpec, ModelSpec

_ATTENTION, _DELTA = "full_attention", "linear_attention"
_DENSE, _SPARSE = "dense", "sparse"
_MIXTURE = "block_sparse_moe"
_NAMES = LayerNames(
    router=f"{_MIXTURE}.gate",
    router_correction=f"{_MIXTURE}.gate.e_score_correction_bias",
    shared=f"{_MIXTURE}.shared_experts",
    experts=f"{_MIXTURE}.experts",
)
_EXPERT = {"gate": "w1", "up": "w3", "down": "w2"}  # names in routed experts; the shared expert has the usual names
_SPELLING = {
    "max_position_embeddings": "model_max_length",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
}
# Sizes that a config.json may leave out.
_DEFAULTS = {
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "rms_norm_eps": 1e-5,
    "routed_scaling_factor": 2.446,
}
_SECTION = "linear_attn_config"
_SIZES = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
_SIZES |= {"short_conv_kernel_size": "linear_conv_kernel_dim"}  # keys of the section, and transformers' for them


def read_spec(config: Config) -> ModelSpec:
    """Read a Kimi Linear config.json, the publisher's or transformers'. Raises ModelError."""
    config.fill_spelled(_SPELLING)
    for key, value in _DEFAULTS.items():
        config.fill(key, value)
    config.override("head_dim", config.integer("qk_rope_head_dim"))  # nothing reads the publisher's value
    config.require("mla_use_nope", True)
    config.require("moe_router_activation_func", "sigmoid")
    config.require("use_grouped_topk", True)
    config.require("hidden_act", "silu")
    kinds = _read_section(config)
    stated = config.raw("mlp_layer_types") is not None
    if stated:
        config.pass_over("first_k_dense_replace")
        config.override("first_k_dense_replace", 0)
    spec = with_latents(config, "kimi_linear")
    sparse = with_grouped_experts(config, spec, dense=1, normalise=True)
    if stated:
        mlps = read_kinds(config, spec.n_layers, (_DENSE, _SPARSE), key="mlp_layer_types")
        sparse = tuple(
            layer if kind == _SPARSE else replace(layer, moe=None) for layer, kind in zip(sparse, mlps, strict=True)
        )
    return replace(spec, layers=_with_deltas(config, kinds, sparse))


def _read_section(config: Config) -> list[str] | None:
    """Take the sizes of the publisher's section, which precede others; return the kinds of its layers, if any."""
    if config.raw(_SECTION) is None:
        return None
    section = config.section(_SECTION)
    for key, other in _SIZES.items():
        if section.raw(key) is not None:
            config.override(other, section.integer(key))
    places = {key: section.raw(key) for key in ("full_attn_layers", "kda_layers")}
    if None in places.values():
        return None
    n_layers = config.integer("num_hidden_layers")
    kinds = [""] * n_layers
    for (key, numbers), kind in zip(places.items(), (_ATTENTION, _DELTA), strict=True):
        if not isinstance(numbers, list) or not {*numbers} <= {*range(1, n_layers + 1)}:
            raise section.error(key, f"expected numbers of layers, 1 to {n_layers}, found {numbers!r}")
        for number in numbers:
            kinds[number - 1] = kind
    if "" in kinds or sum(map(len, places.values())) != n_layers:
        raise config.error(_SECTION, f"expected each layer of {n_layers} once in full_attn_layers or kda_layers")
    return kinds


def _with_deltas(config: Config, kinds: list[str] | None, layers: tuple[LayerSpec, ...]) -> tuple[LayerSpec, ...]:
    size, n_heads = config.integer("linear_head_dim", 128), config.integer("linear_num_heads", 32)
    mixer = DeltaNet(n_heads, n_heads, size, size, config.integer("linear_conv_kernel_dim", 4), rank=size)
    default = kinds or [_DELTA if index % 4 or not index else _ATTENTION for index in range(len(layers))]
    stated = read_kinds(config, len(layers), (_ATTENTION, _DELTA), default)
    return tuple(
        replace(layer, rope=None) if kind == _ATTENTION else replace(layer, rope=None, attends=False, mixer=mixer)
        for layer, kind in zip(layers, stated, strict=True)
    )


def refs(spec: ModelSpec) -> Refs:
    """Name the tensors as the publisher does."""
    refs = latent_refs(spec, standard_refs(spec, _NAMES))
    for index, layer in enumerate(spec.layers):
        key, module = f"layers.{index}.", f"model.layers.{index}."
        for number in range(layer.moe.n_experts if layer.moe is not None else 0):
            for part, name in _EXPERT.items():
                stored = f"{module}{_MIXTURE}.experts.{number}.{name}.weight"
                refs[f"{key}experts.{number}.{part}"] = TensorRef(stored)
        if layer.mixer is not None:
            refs |= _delta_refs(key, f"{module}self_attn.")
    return refs


def _delta_refs(key: str, module: str) -> Refs:
    products = {part: f"{part}_proj" for part in "qkv"}
    products |= {"rate": "b_proj", "z_few": "g_a_proj", "z": "g_b_proj", "dt_few": "f_a_proj", "dt": "f_b_proj"}
    refs: Refs = {}
    for part, name in (products | {"norm": "o_norm", "out": "o_proj"}).items():
        refs |= linear_refs(f"{key}delta_{part}", module + name, bias=False)
    for part in "qkv":
        refs[f"{key}filter_{part}"] = TensorRef(f"{module}{part}_conv1d.weight", filtered=True)
    refs[f"{key}delta_a"] = TensorRef(f"{module}A_log", boxed=True)
    refs[f"{key}delta_step"] = TensorRef(f"{module}dt_bias")
    return refs


FAMILY = Family(
    "KimiLinearForCausalLM",
    "kimi_linear",
    read_spec,
    refs,
    stacked=StackedNames(dense=_MIXTURE),
    spelling=_SPELLING,
)
