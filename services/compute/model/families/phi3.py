"""Phi 3: Llama with fused projections and, for long contexts, LongRoPE."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import concatenated, in_layers
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, Refs, standard_refs
from services.compute.model.families.windows import same_window
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Phi 3 config.json. Raises ModelError."""
    spec = base_spec(config, "phi3", norm_eps=1e-5, partial=1.0)
    return replace(spec, layers=same_window(config, spec))


def refs(spec: ModelSpec) -> Refs:
    """Name Phi 3's tensors: q, k and v are one tensor, gate and up another."""
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    qkv, halves = {"q": q, "k": kv, "v": kv}, dict.fromkeys(("gate", "up"), spec.ffn_size)

    def fused(index: int) -> Refs:
        module = f"model.layers.{index}."
        return concatenated(f"{module}self_attn.qkv_proj", qkv) | concatenated(f"{module}mlp.gate_up_proj", halves)

    return standard_refs(spec) | in_layers(spec, fused)


FAMILY = Family("Phi3ForCausalLM", "phi3", read_spec, refs)
