"""Qwen 3 Next and Qwen 3.5: gated delta rules in three of four layers, gated attention in the others."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.families.qwen import with_experts
from services.compute.model.families.rope import as_usual_rope
from services.compute.model.families.windows import read_kinds
from services.compute.model.mixers import DeltaNet
from services.compute.model.spec import LayerSpec, ModelSpec

_ATTENTION, _DELTA = "full_attention", "linear_attention"
_NAMES = LayerNames(shared="mlp.shared_expert")


def _base(config: Config, family: str) -> ModelSpec:
    """Return the spec with delta rules and attention, before its experts. Raises ModelError."""
    config.require("attention_bias", False)
    config.require("attn_output_gate", True)
    config.pass_over("mamba_ssm_dtype", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    config.require("hidden_act", "silu")
    config.fill("head_dim", 256)
    spec = replace(base_spec(config, family, partial=0.25), norm_offset=1.0, qk_norm="head", attention_gate=True)
    mixer = DeltaNet(
        config.integer("linear_num_key_heads", 16),
        config.integer("linear_num_value_heads", 32),
        config.integer("linear_key_head_dim", 128),
        config.integer("linear_value_head_dim", 128),
        config.integer("linear_conv_kernel_dim", 4),
    )
    if mixer.n_value_heads % mixer.n_key_heads:
        problem = f"expected a multiple of linear_num_key_heads {mixer.n_key_heads}, found {mixer.n_value_heads}"
        raise config.error("linear_num_value_heads", problem)
    return replace(spec, layers=_layers(config, spec, mixer))


def _layers(config: Config, spec: ModelSpec, mixer: DeltaNet) -> tuple[LayerSpec, ...]:
    interval = config.integer("full_attention_interval", 4)
    default = [_DELTA if (index + 1) % interval else _ATTENTION for index in range(spec.n_layers)]
    kinds = read_kinds(config, spec.n_layers, (_ATTENTION, _DELTA), default)
    delta = LayerSpec(attends=False, mixer=mixer)
    return tuple(layer if kind == _ATTENTION else delta for layer, kind in zip(spec.layers, kinds, strict=True))


def read_qwen3_next(config: Config) -> ModelSpec:
    """Read a Qwen 3 Next config.json. Raises ModelError."""
    config.fill("norm_topk_prob", True)
    return _with_shared_expert(config, _base(config, "qwen3_next"))


def read_qwen3_5(config: Config) -> ModelSpec:
    """Read the text's config.json of a dense Qwen 3.5. Raises ModelError."""
    as_usual_rope(config)
    config.pass_over("mlp_only_layers")  # all layers have an MLP alone
    return _base(config, "qwen3_5_text")


def read_qwen3_5_moe(config: Config) -> ModelSpec:
    """Read the text's config.json of a Qwen 3.5 mixture. Raises ModelError."""
    as_usual_rope(config)
    config.fill("norm_topk_prob", True)
    config.fill("intermediate_size", config.integer("moe_intermediate_size"))
    return _with_shared_expert(config, _base(config, "qwen3_5_moe_text"))


def _with_shared_expert(config: Config, spec: ModelSpec) -> ModelSpec:
    shared_size = config.integer("shared_expert_intermediate_size", 512)
    return with_experts(config, spec, shared_size=shared_size, shared_gate=True)


def refs_next(spec: ModelSpec) -> Refs:
    """Name Qwen 3 Next's tensors: one has q, k, v and z, one the two numbers of each value head, by key head."""
    refs = _common_refs(spec)
    for index, layer in enumerate(spec.layers):
        if not isinstance(mixer := layer.mixer, DeltaNet):
            continue
        key, module = f"layers.{index}.delta_", f"{_module(index)}in_proj_"
        group = mixer.n_value_heads // mixer.n_key_heads
        unit = gcd(mixer.key_dim, mixer.value_dim)
        parts = {"q": mixer.key_dim, "k": mixer.key_dim, "v": group * mixer.value_dim, "z": group * mixer.value_dim}
        place, n_parts, name = 0, sum(parts.values()) // unit, f"{module}qkvz.weight"
        for part, size in parts.items():
            refs[key + part] = TensorRef(name, unit=unit, part=place, n_units=size // unit, n_parts=n_parts)
            place += size // unit
        for half, part in enumerate(("rate", "dt")):
            refs[key + part] = TensorRef(
                f"{_module(index)}in_proj_ba.weight", unit=group, part=half, n_units=1, n_parts=2
            )
    return refs


def refs_3_5(spec: ModelSpec) -> Refs:
    """Name Qwen 3.5's tensors: q, k and v are one."""
    refs = _common_refs(spec)
    for index, layer in enumerate(spec.layers):
        if not isinstance(mixer := layer.mixer, DeltaNet):
            continue
        key, module = f"layers.{index}.delta_", f"{_module(index)}in_proj_"
        n_stored = 2 * mixer.keys + mixer.values
        for part, start in (("q", 0), ("k", mixer.keys), ("v", 2 * mixer.keys)):
            refs[key + part] = TensorRef(f"{module}qkv.weight", start=start, n_stored=n_stored)
        for part, name in (("z", "z"), ("rate", "b"), ("dt", "a")):
            refs[key + part] = TensorRef(f"{module}{name}.weight")
    return refs


def _module(index: int) -> str:
    return f"model.layers.{index}.linear_attn."


def _common_refs(spec: ModelSpec) -> Refs:
    """Name the tensors that both families name alike; a head's query and its gate lie side by side."""
    refs = standard_refs(spec, _NAMES)
    for index, layer in enumerate(spec.layers):
        key, module = f"layers.{index}.", _module(index)
        if layer.attends:
            for part, place in (("q", 0), ("attention_gate", 1)):
                name = refs[f"{key}k"].name.replace("k_proj", "q_proj")
                refs[key + part] = TensorRef(name, unit=spec.head_dim, part=place, n_units=1, n_parts=2)
        if not isinstance(mixer := layer.mixer, DeltaNet):
            continue
        n_stored = 2 * mixer.keys + mixer.values
        for part, start in (("q", 0), ("k", mixer.keys), ("v", 2 * mixer.keys)):
            filters = TensorRef(f"{module}conv1d.weight", start=start, n_stored=n_stored, filtered=True)
            refs[f"{key}filter_{part}"] = filters
        names = {"a": "A_log", "step": "dt_bias", "norm": "norm.weight", "out": "out_proj.weight"}
        refs |= {f"{key}delta_{part}": TensorRef(module + name) for part, name in names.items()}
    return refs


QWEN3_NEXT = Family("Qwen3NextForCausalLM", "qwen3_next", read_qwen3_next, refs_next)
QWEN3_5 = Family("Qwen3_5ForCausalLM", "qwen3_5_text", read_qwen3_5, refs_3_5, base="Qwen3_5TextModel")
QWEN3_5_MOE = Family(
    "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", read_qwen3_5_moe, refs_3_5, base="Qwen3_5MoeTextModel"
)
