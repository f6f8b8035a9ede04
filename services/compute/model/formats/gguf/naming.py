"""The names, places and sizes of a model's tensors in a GGUF file, the same for all architectures. Free of torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from services.compute.model.families.fused import concatenated
from services.compute.model.families.naming import Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.formats.gguf.architectures import Architecture
from services.compute.model.formats.gguf.config import EMBEDDING, FACTORS, HEAD
from services.compute.model.formats.gguf.container import TensorInfo
from services.compute.model.formats.gguf.states import mixer_refs
from services.compute.model.spec import IntegerPart, ModelSpec, MoeSpec

_LAYERS = "blk."
_NAMES = LayerNames(
    q="attn_q",
    k="attn_k",
    v="attn_v",
    o="attn_output",
    q_norm="attn_q_norm",
    k_norm="attn_k_norm",
    gate="ffn_gate",
    up="ffn_up",
    down="ffn_down",
    attn_norm="attn_norm",
    mlp_norm="ffn_norm",
    attn_post_norm="post_attention_norm",
    mlp_post_norm="post_ffw_norm",
    router="ffn_gate_inp",
    router_correction="exp_probs_b.bias",
    shared_gate="ffn_gate_inp_shexp",
)
_IGNORED = (*FACTORS.values(), "*.attn_rot_embd", "*.rope_freqs.weight")  # tables that the config holds


def stored_in_gguf(family: Family, architecture: Architecture) -> Family:
    """Return the family with the tensors' names in GGUF files."""

    def refs(spec: ModelSpec) -> Refs:
        return _refs(spec, architecture)

    return replace(family, refs=refs, ignored=_IGNORED, optional_prefix="")


def as_stored(spec: ModelSpec) -> ModelSpec:
    """Return the spec of the stored weights: norms hold their whole factor, also those of Gemma."""
    return replace(spec, norm_offset=0.0)


def with_sizes(spec: ModelSpec, tensors: Iterable[TensorInfo]) -> ModelSpec:
    """Return the spec with what the stored matrices take of memory."""
    matrices = [info for info in tensors if len(info.shape) > 1]
    layers = [info for info in matrices if info.name.startswith(_LAYERS)]
    tables = [info for info in matrices if info.name in (EMBEDDING, HEAD)]
    return replace(spec, in_layers=_integer_part(layers), in_tables=_integer_part(tables))


def _integer_part(matrices: Sequence[TensorInfo]) -> IntegerPart | None:
    integers = [info for info in matrices if info.type.kept_bits]
    if not integers:
        return None
    n_elements, total = (sum(math.prod(info.shape) for info in of) for of in (integers, matrices))
    n_bytes = sum(math.prod(info.shape) * info.type.kept_bits for info in integers) / 8
    return IntegerPart(n_elements / total, n_bytes / n_elements)


def _refs(spec: ModelSpec, architecture: Architecture) -> Refs:
    named = dict(architecture.names)
    norm, unsuffixed = named.pop("norm", "output_norm"), named.pop("mlp_norm.weight", "")
    names = replace(_NAMES, **named)
    refs = standard_refs(spec, names, prefix=_LAYERS, embed="token_embd", norm=norm, head="output")
    if spec.learned_positions:
        refs["positions"] = TensorRef("position_embd.weight")
    for index, layer in enumerate(spec.layers):
        key, module = f"layers.{index}.", f"{_LAYERS}{index}."
        if layer.attends:
            refs |= _attention(key, module, spec, architecture, refs)
        if layer.mixer is not None:
            refs |= mixer_refs(key, module, layer.mixer, tiled=architecture.tiled)
        if unsuffixed:
            refs[f"{key}mlp_norm"] = TensorRef(module + unsuffixed)
        if architecture.one_gate_up:
            refs |= concatenated(f"{module}ffn_up", {f"{key}gate": spec.ffn_size, f"{key}up": spec.ffn_size})
        if layer.moe is not None:
            refs |= _experts(key, module, layer.moe, gated=spec.mlp == "gated")
    return refs


def _attention(key: str, module: str, spec: ModelSpec, architecture: Architecture, named: Refs) -> Refs:
    """Return the references of attention that differ from the `named` ones."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    refs: Refs = {}
    if architecture.one_qkv:
        refs = concatenated(f"{module}attn_qkv", {f"{key}q": q, f"{key}k": kv, f"{key}v": kv}, bias=spec.qkv_bias)
    if spec.attention_gate:  # a head's query and its gate lie side by side
        query = replace(named[f"{key}q"], unit=spec.head_dim, n_parts=2)
        refs |= {f"{key}q": query, f"{key}attention_gate": replace(query, part=1)}
    if architecture.paired:  # whole heads, also in layers without a rope: only adapters see the order there
        for part in (key + part for part in ("q", "k", "q.bias", "k.bias")):
            if part in named:
                refs[part] = replace(named[part], unit=spec.head_dim, n_paired=spec.head_dim)
    return refs


def _experts(key: str, module: str, moe: MoeSpec, *, gated: bool) -> Refs:
    """Return the references of experts: those of a layer are one tensor for each projection."""
    parts, shared = ("gate",) * gated + ("up", "down"), Refs()
    if moe.shared_size:
        shared = {f"{key}shared.{part}": TensorRef(f"{module}ffn_{part}_shexp.weight") for part in parts}
    if moe.shared_gate:
        shared[f"{key}shared_gate"] = TensorRef(f"{module}ffn_gate_inp_shexp.weight", flat=True)
    return shared | {
        f"{key}experts.{expert}.{part}": TensorRef(
            f"{module}ffn_{part}_exps.weight", place=expert, n_stacked=moe.n_experts
        )
        for expert in range(moe.n_experts)
        for part in parts
    }
