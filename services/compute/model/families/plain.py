"""Configurations with layer norms, biases and an MLP without a gate, which spell their keys in many ways."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.compute.model.families.config import MAX_LAYERS, Config
from services.compute.model.families.llama import ACTIVATIONS, read_dtype, read_eos
from services.compute.model.spec import LayerSpec, ModelSpec, RopeSpec


def plain_spec(
    config: Config,
    family: str,
    spelling: Mapping[str, str],
    *,
    activation: str,
    bias: bool = True,
    tied: bool = True,
    rope: RopeSpec | None = None,
    n_kv_heads: int | None = None,
) -> ModelSpec:
    """Return the spec from the keys that all these configurations have.

    `spelling` holds their names by Llama's. The other arguments: the default of the activation, whether linear layers
    have biases, the default of the tied head, the layers' rope, and the number of KV heads if there are fewer.
    """

    def key(name: str) -> str:
        return spelling.get(name, name)

    hidden_size, n_heads = config.integer(key("hidden_size")), config.integer(key("num_attention_heads"))
    head_dim = config.quotient(key("hidden_size"), key("num_attention_heads"))
    return ModelSpec(
        family=family,
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=config.integer(key("intermediate_size"), 4 * hidden_size),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads or n_heads,
        head_dim=head_dim,
        max_positions=config.integer(key("max_position_embeddings"), 2048),
        layers=(LayerSpec(rope=rope),) * config.integer(key("num_hidden_layers"), at_most=MAX_LAYERS),
        norm="layer",
        norm_eps=config.number(key("layer_norm_eps"), 1e-5),
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        mlp="plain",
        activation=config.choice(key("hidden_act"), ACTIVATIONS, activation),
        tied=config.flag("tie_word_embeddings", tied),
        attention_scale=1 / math.sqrt(head_dim),
        eos_token_ids=read_eos(config),
    )


# The keys of GPT-2 and of the models that followed it.
GPT_SPELLING = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "hidden_act": "activation_function",
}
