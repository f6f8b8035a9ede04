"""BLOOM: a linear bias of the distance in place of positions (ALiBi), and normalised embeddings."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import by_kv_head, in_layers
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.plain import GPT_SPELLING, plain_spec
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(o="self_attention.dense", up="mlp.dense_h_to_4h", down="mlp.dense_4h_to_h")
_SPELLING = GPT_SPELLING | {"hidden_size": "hidden_size", "max_position_embeddings": "seq_length"}


def read_spec(config: Config) -> ModelSpec:
    """Read a BLOOM config.json. Raises ModelError."""
    config.require("apply_residual_connection_post_layernorm", False)
    # How its programs divided and computed the products; masks and fused kernels of the training.
    config.pass_over("pretraining_tp", "slow_but_exact", "skip_bias_add", "skip_bias_add_qkv", "bias_dropout_fusion")
    config.pass_over("attention_softmax_in_fp32", "masked_softmax_fusion", "offset_alibi", "unk_token_id")
    config.fill("hidden_size", config.raw("n_embed"))
    config.fill("n_head", config.raw("num_attention_heads"))
    spec = plain_spec(config, "bloom", _SPELLING, activation="gelu_pytorch_tanh")
    return replace(spec, alibi=True, embed_norm=True)


def refs(spec: ModelSpec) -> Refs:
    """Name BLOOM's tensors: q, k and v of each head are adjacent."""
    body = "transformer."
    refs = standard_refs(
        spec,
        _NAMES,
        prefix=f"{body}h.",
        embed=f"{body}word_embeddings",
        embed_norm=f"{body}word_embeddings_layernorm",
        norm=f"{body}ln_f",
    )
    return refs | in_layers(spec, lambda i: by_kv_head(f"{body}h.{i}.self_attention.query_key_value", spec))


FAMILY = Family("BloomForCausalLM", "bloom", read_spec, refs, optional_prefix="transformer.", spelling=_SPELLING)
