"""GPT-2: learned positions, layer norm, weights stored [in, out]."""

from __future__ import annotations

import math

from services.worker.model.families.config import MAX_LAYERS, Config
from services.worker.model.families.llama import ACTIVATIONS, read_dtype, read_eos
from services.worker.model.families.naming import UNUSED, Family, LayerNames, Refs, TensorRef, standard_refs
from services.worker.model.spec import LayerSpec, ModelSpec

_NAMES = LayerNames(
    q="attn.c_attn",
    k="attn.c_attn",
    v="attn.c_attn",
    o="attn.c_proj",
    up="mlp.c_fc",
    down="mlp.c_proj",
    attn_norm="ln_1",
    mlp_norm="ln_2",
)


def read_spec(config: Config) -> ModelSpec:
    """Read a GPT-2 config.json. Raises ModelError."""
    config.require("scale_attn_by_inverse_layer_idx", False)
    hidden_size, n_heads = config.integer("n_embd"), config.integer("n_head")
    head_dim = config.quotient("n_embd", "n_head")
    return ModelSpec(
        family="gpt2",
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=config.integer("n_inner", 4 * hidden_size),
        n_heads=n_heads,
        n_kv_heads=n_heads,
        head_dim=head_dim,
        max_positions=config.integer("n_positions"),
        layers=(LayerSpec(),) * config.integer("n_layer", at_most=MAX_LAYERS),
        norm="layer",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        norm_bias=True,
        learned_positions=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        mlp="plain",
        activation=config.choice("activation_function", ACTIVATIONS, "gelu_new"),
        tied=config.flag("tie_word_embeddings", True),
        attention_scale=1 / math.sqrt(head_dim) if config.flag("scale_attn_weights", True) else 1.0,
        eos_token_ids=read_eos(config),
    )


def refs(spec: ModelSpec) -> Refs:
    """Name GPT-2's tensors: q, k and v are one tensor, and linear weights are transposed."""
    prefix = "transformer."
    found = standard_refs(
        spec, _NAMES, prefix=f"{prefix}h.", embed=f"{prefix}wte", norm=f"{prefix}ln_f", head="lm_head"
    )
    found["positions"] = TensorRef(f"{prefix}wpe.weight")
    hidden = spec.hidden_size
    for index in range(spec.n_layers):
        key = f"layers.{index}."
        for number, part in enumerate("qkv"):
            name = f"{prefix}h.{index}.attn.c_attn"
            start, n_stored = number * hidden, 3 * hidden
            found[key + part] = TensorRef(f"{name}.weight", transposed=True, start=start, n_stored=n_stored)
            found[f"{key}{part}.bias"] = TensorRef(f"{name}.bias", start=start, n_stored=n_stored)
        for part in ("o", "up", "down"):
            found[key + part] = TensorRef(found[key + part].name, transposed=True)
    return found


# The first checkpoints were stored without "transformer."; attn.bias is the causal mask.
FAMILY = Family(
    "GPT2LMHeadModel",
    "gpt2",
    read_spec,
    refs,
    (*UNUSED, "*.attn.bias", "*.attn.masked_bias"),
    optional_prefix="transformer.",
    base="GPT2Model",
    spelling={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "max_position_embeddings": "n_positions",
    },
)
