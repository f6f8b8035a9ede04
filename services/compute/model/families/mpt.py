"""MPT: a linear bias of the distance in place of positions (ALiBi), layer norms and linear layers without biases."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import concatenated, in_layers
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.plain import plain_spec
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(o="attn.out_proj", up="ffn.up_proj", down="ffn.down_proj", attn_norm="norm_1", mlp_norm="norm_2")
_SPELLING = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_hidden_layers": "n_layers",
    "max_position_embeddings": "max_seq_len",
    "layer_norm_eps": "layer_norm_epsilon",
}


def read_spec(config: Config) -> ModelSpec:
    """Read an MPT config.json. Raises ModelError."""
    config.require("no_bias", True)
    config.require("expansion_ratio", 4)
    config.require("logit_scale", 1)
    config.require("norm_type", "low_precision_layernorm", "layernorm")
    config.pass_over("learned_pos_emb")  # no effect with ALiBi
    config.pass_over("emb_pdrop", "embedding_fraction", "init_device", "init_config", "verbose", "tokenizer_name")
    scale = _read_attention_scale(config)
    spec = plain_spec(config, "mpt", _SPELLING, activation="gelu", bias=False)
    return replace(spec, norm_bias=False, alibi=True, attention_scale=scale or spec.attention_scale)


def _read_attention_scale(config: Config) -> float | None:
    """Return the scale of q·k, None for the usual one."""
    if config.raw("attn_config") is None:
        return None
    attention = config.section("attn_config")
    for key, only in (("attn_type", "multihead_attention"), ("alibi", True), ("alibi_bias_max", 8)):
        attention.require(key, only)
    for key in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
        attention.require(key, False)
    attention.require("clip_qkv")
    attention.pass_over("attn_pdrop", "attn_impl")
    return attention.optional_number("softmax_scale")


def refs(spec: ModelSpec) -> Refs:
    """Name MPT's tensors: q, k and v are one tensor."""
    body = "transformer."
    refs = standard_refs(spec, _NAMES, prefix=f"{body}blocks.", embed=f"{body}wte", norm=f"{body}norm_f")
    sizes = dict.fromkeys("qkv", spec.hidden_size)
    return refs | in_layers(spec, lambda i: concatenated(f"{body}blocks.{i}.attn.Wqkv", sizes))


FAMILY = Family(
    "MptForCausalLM",
    "mpt",
    read_spec,
    refs,
    optional_prefix="transformer.",
    aliases=("MPTForCausalLM",),
    spelling=_SPELLING,
)
