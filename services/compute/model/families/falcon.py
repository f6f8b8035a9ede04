"""Falcon 7B, 11B, 40B and 180B: attention and MLP side by side, q heads stored next to the KV head that they share."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import by_kv_head, in_layers
from services.compute.model.families.llama import one_rope
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.plain import plain_spec
from services.compute.model.families.rope import read_ropes
from services.compute.model.spec import ModelSpec

_SPELLING = {
    "intermediate_size": "ffn_hidden_size",
    "num_key_value_heads": "num_kv_heads",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation",
}
_NAMES = LayerNames(o="self_attention.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
_TWO_NORMS = replace(_NAMES, attn_norm="ln_attn", mlp_norm="ln_mlp")


def read_spec(config: Config) -> ModelSpec:
    """Read a Falcon config.json. Raises ModelError."""
    config.require("alibi", False)  # its bias is rounded to bfloat16, as in no other family
    config.require("apply_residual_connection_post_layernorm", False)
    config.fill("max_position_embeddings", 2048)
    grouped, parallel = config.flag("new_decoder_architecture", False), config.flag("parallel_attn", True)
    bias, multi_query = config.flag("bias", False), config.flag("multi_query", True)
    n_kv_heads = 1 if multi_query else None
    if grouped:
        n_heads = config.integer("num_attention_heads")
        n_kv_heads = config.integer("num_kv_heads", n_heads)
        if n_heads % n_kv_heads:
            raise config.error(
                "num_kv_heads", f"expected a divisor of num_attention_heads {n_heads}, found {n_kv_heads}"
            )
        config.require("parallel_attn", True)
    config.pass_over("num_kv_heads")  # without new_decoder_architecture multi_query decides
    norms = config.raw("num_ln_in_parallel_attn")
    config.require("num_ln_in_parallel_attn", *((1, 2) if grouped else (1,)))
    rope = one_rope(config, read_ropes(config, config.quotient("hidden_size", "num_attention_heads")))
    spec = plain_spec(config, "falcon", _SPELLING, activation="gelu", bias=bias, rope=rope, n_kv_heads=n_kv_heads)
    parallel = parallel or grouped
    return replace(spec, parallel_residual=parallel, shared_norm=parallel and (norms == 1 or not grouped))


def refs(spec: ModelSpec) -> Refs:
    """Name Falcon's tensors."""
    body = "transformer."
    names = _TWO_NORMS if spec.parallel_residual and not spec.shared_norm else _NAMES
    refs = standard_refs(spec, names, prefix=f"{body}h.", embed=f"{body}word_embeddings", norm=f"{body}ln_f")
    return refs | in_layers(spec, lambda i: by_kv_head(f"{body}h.{i}.self_attention.query_key_value", spec))


FAMILY = Family("FalconForCausalLM", "falcon", read_spec, refs, optional_prefix="transformer.", spelling=_SPELLING)
