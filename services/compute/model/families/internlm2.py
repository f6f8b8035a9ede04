"""InternLM 2: Llama whose q, k and v are one tensor, ordered by KV head."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import by_kv_head, in_layers
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(
    o="attention.wo",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    attn_norm="attention_norm",
    mlp_norm="ffn_norm",
)


def read_spec(config: Config) -> ModelSpec:
    """Read an InternLM 2 config.json. Raises ModelError."""
    bias = config.flag("bias", True)
    return replace(base_spec(config, "internlm2"), qkv_bias=bias, o_bias=bias)


def refs(spec: ModelSpec) -> Refs:
    """Name InternLM 2's tensors."""
    refs = standard_refs(spec, _NAMES, embed="model.tok_embeddings", head="output")
    return refs | in_layers(spec, lambda i: by_kv_head(f"model.layers.{i}.attention.wqkv", spec))


FAMILY = Family("InternLM2ForCausalLM", "internlm2", read_spec, refs)
