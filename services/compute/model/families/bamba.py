"""Bamba: Llama with state-space layers (Mamba 2) in place of most attention."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.statespace import ATTENTION, STATE, mixed_layers, read_mamba2, with_mamba2
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(
    gate="feed_forward.gate_proj",
    up="feed_forward.up_proj",
    down="feed_forward.down_proj",
    mlp_norm="pre_ff_layernorm",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a Bamba config.json. Raises ModelError."""
    config.pass_over("attn_rotary_emb")  # repeats the rotated part
    spec = base_spec(config, "bamba", norm_eps=1e-5, partial=0.5, attention_bias=False, mlp_bias=False)
    attending = config.raw("attn_layer_indices") or []
    listed = isinstance(attending, list)
    default = [ATTENTION[0] if index in attending else STATE[0] for index in range(spec.n_layers)] if listed else None
    return replace(spec, layers=mixed_layers(config, spec, read_mamba2(config, spec.hidden_size), default))


def refs(spec: ModelSpec) -> Refs:
    """Name Bamba's tensors."""
    return with_mamba2(spec, standard_refs(spec, _NAMES, norm="model.final_layernorm"), "model.layers.{}.mamba.")


FAMILY = Family("BambaForCausalLM", "bamba", read_spec, refs)
