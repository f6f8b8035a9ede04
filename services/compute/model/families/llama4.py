"""Llama 4 (text): attention in chunks, layers without a rope, a shared expert and others that scale their inputs."""

from __future__ import annotations

from dataclasses import replace

from services.compute.backends.shapes import ExpertRouting
from services.compute.model.families.config import Config
from services.compute.model.families.fused import paired
from services.compute.model.families.llama import base_spec, read_moe
from services.compute.model.families.naming import Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.families.smollm3 import read_rotated
from services.compute.model.families.windows import read_kinds
from services.compute.model.spec import ModelSpec, QueryScale

_CHUNKED, _FULL = "chunked_attention", "full_attention"
_NAMES = LayerNames(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    router="feed_forward.router",
    shared="feed_forward.shared_expert",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a Llama 4 text config.json. Raises ModelError."""
    for key in ("router_jitter_noise", "for_llm_compressor"):
        config.pass_over(key)
    config.fill("head_dim", 128)
    spec = base_spec(config, "llama4_text", norm_eps=1e-5, theta=500_000.0, attention_bias=False)
    dense_size = config.integer("intermediate_size_mlp", 16_384)
    moe = read_moe(config, "num_local_experts", ffn_size=spec.ffn_size, normalise=False)
    routing = ExpertRouting(moe.routing.n_active, False, "sigmoid", on_inputs=True)
    moe = replace(moe, routing=routing, shared_size=spec.ffn_size)
    scale = None
    if config.flag("attn_temperature_tuning", True):
        scale = QueryScale(config.number("attn_scale", 0.1), config.integer("floor_scale", 8192), first=1)
    config.pass_over("attn_scale", "floor_scale")
    rotated = read_rotated(config, spec.n_layers)
    chunks, mixed = _read_chunks(config, spec, rotated), _read_mixed(config, spec.n_layers)
    layers = tuple(
        replace(
            layer,
            chunk=chunks[index],
            rope=layer.rope if rotated[index] else None,
            query_scale=None if rotated[index] else scale,
            moe=moe if index in mixed else None,
        )
        for index, layer in enumerate(spec.layers)
    )
    normed = config.flag("use_qk_norm", True)
    return replace(
        spec,
        layers=layers,
        ffn_size=dense_size,
        qk_norm="unit" if normed else None,
        qk_norm_rotated=normed,
    )


def _read_chunks(config: Config, spec: ModelSpec, rotated: list[bool]) -> list[int | None]:
    """Return the chunk of every layer; by default those with a rope have one."""
    default = [_CHUNKED if rotates else _FULL for rotates in rotated]
    kinds = read_kinds(config, spec.n_layers, (_CHUNKED, _FULL), default)
    chunk = config.integer("attention_chunk_size", 8192)
    reaches = chunk if chunk < spec.max_positions else None
    return [reaches if kind == _CHUNKED else None for kind in kinds]


def _read_mixed(config: Config, n_layers: int) -> list[int]:
    """Return the layers with experts."""
    step, mixed = config.integer("interleave_moe_layer_step", 1), config.raw("moe_layers")
    if mixed is None:
        return list(range(step - 1, n_layers, step))
    if not isinstance(mixed, list) or any(type(index) is not int for index in mixed):
        raise config.error("moe_layers", f"expected a list of layers, found {mixed!r}")
    return mixed


def refs(spec: ModelSpec) -> Refs:
    """Name Llama 4's tensors: the experts of a layer are stacked and stored [in, out]; the rope is interleaved."""
    refs = paired(spec, standard_refs(spec, _NAMES))
    for index, layer in enumerate(spec.layers):
        if layer.moe is None:
            continue
        module, n, ffn = f"model.layers.{index}.feed_forward.experts.", layer.moe.n_experts, layer.moe.ffn_size
        for expert in range(n):
            key = f"layers.{index}.experts.{expert}."
            gate = TensorRef(f"{module}gate_up_proj", True, n_stored=2 * ffn, place=expert, n_stacked=n)
            refs[f"{key}gate"], refs[f"{key}up"] = gate, replace(gate, start=ffn)
            refs[f"{key}down"] = TensorRef(f"{module}down_proj", True, place=expert, n_stacked=n)
    return refs


FAMILY = Family(
    "Llama4ForCausalLM",
    "llama4_text",
    read_spec,
    refs,
    stacked=None,
    spelling={
        "intermediate_size": "intermediate_size_mlp",
        "moe_intermediate_size": "intermediate_size",
        "shared_expert_intermediate_size": "intermediate_size",
    },
)
