"""GPT-NeoX (Pythia): parallel residual, partial rotary, q, k and v of each head adjacent."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import by_kv_head, in_layers
from services.compute.model.families.llama import one_rope
from services.compute.model.families.naming import UNUSED, Family, LayerNames, Refs, standard_refs
from services.compute.model.families.plain import plain_spec
from services.compute.model.families.rope import read_ropes
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a GPT-NeoX config.json. Raises ModelError."""
    head_dim, bias = config.quotient("hidden_size", "num_attention_heads"), config.flag("attention_bias", True)
    ropes = read_ropes(config, head_dim, partial_key="rotary_pct", partial=0.25, theta_key="rotary_emb_base")
    config.integer("intermediate_size")
    spec = plain_spec(config, "gpt_neox", {}, activation="gelu", tied=False, rope=one_rope(config, ropes))
    parallel = config.flag("use_parallel_residual", True)
    return replace(spec, parallel_residual=parallel, qkv_bias=bias, o_bias=bias)


def refs(spec: ModelSpec) -> Refs:
    """Name GPT-NeoX's tensors."""
    module = "gpt_neox."
    refs = standard_refs(
        spec,
        _NAMES,
        prefix=f"{module}layers.",
        embed=f"{module}embed_in",
        norm=f"{module}final_layer_norm",
        head="embed_out",
    )
    return refs | in_layers(spec, lambda i: by_kv_head(f"{module}layers.{i}.attention.query_key_value", spec))


FAMILY = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    read_spec,
    refs,
    (*UNUSED, "*.attention.bias", "*.attention.masked_bias"),
    optional_prefix="gpt_neox.",
)
