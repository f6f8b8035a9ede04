"""GPT-NeoX (Pythia): parallel residual, partial rotary, q, k and v of each head adjacent."""

from __future__ import annotations

import math

from services.worker.model.families.config import MAX_LAYERS, Config
from services.worker.model.families.llama import ACTIVATIONS, one_rope, read_dtype, read_eos
from services.worker.model.families.naming import UNUSED, Family, LayerNames, Refs, TensorRef, standard_refs
from services.worker.model.families.rope import read_ropes
from services.worker.model.spec import LayerSpec, ModelSpec

_NAMES = LayerNames(
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    attn_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a GPT-NeoX config.json. Raises ModelError."""
    hidden_size, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.quotient("hidden_size", "num_attention_heads")
    bias = config.flag("attention_bias", True)
    ropes = read_ropes(config, head_dim, partial_key="rotary_pct", partial=0.25, theta_key="rotary_emb_base")
    rope = one_rope(config, ropes)
    return ModelSpec(
        family="gpt_neox",
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=config.integer("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        max_positions=config.integer("max_position_embeddings"),
        layers=(LayerSpec(rope=rope),) * config.integer("num_hidden_layers", at_most=MAX_LAYERS),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        parallel_residual=config.flag("use_parallel_residual", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=True,
        mlp="plain",
        activation=config.choice("hidden_act", ACTIVATIONS, "gelu"),
        tied=config.flag("tie_word_embeddings", False),
        attention_scale=1 / math.sqrt(head_dim),
        eos_token_ids=read_eos(config),
    )


def refs(spec: ModelSpec) -> Refs:
    """Name GPT-NeoX's tensors."""
    module = "gpt_neox."
    found = standard_refs(
        spec,
        _NAMES,
        prefix=f"{module}layers.",
        embed=f"{module}embed_in",
        norm=f"{module}final_layer_norm",
        head="embed_out",
    )
    for index in range(spec.n_layers):
        for number, part in enumerate("qkv"):
            stored = f"{module}layers.{index}.attention.query_key_value"
            for suffix, tensor in (("", "weight"), (".bias", "bias")):
                key = f"layers.{index}.{part}{suffix}"
                if key in found:
                    found[key] = TensorRef(f"{stored}.{tensor}", unit=spec.head_dim, part=number, n_parts=3)
    return found


FAMILY = Family(
    "GPTNeoXForCausalLM",
    "gpt_neox",
    read_spec,
    refs,
    (*UNUSED, "*.attention.bias", "*.attention.masked_bias"),
    optional_prefix="gpt_neox.",
)
