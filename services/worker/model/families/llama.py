"""Llama 2, 3 and 3.x, and what every family that descends from it shares."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from services.worker.backends.names import Activation
from services.worker.model.families.config import Config
from services.worker.model.families.naming import Family, Refs, standard_refs
from services.worker.model.families.rope import read_ropes
from services.worker.model.loading.files import token_ids
from services.worker.model.spec import LayerSpec, ModelSpec, RopeSpec

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}
_DTYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16"}


def base_spec(
    config: Config,
    family: str,
    *,
    ropes: dict[str, RopeSpec] | None = None,
    tied: bool = False,
    norm_eps: float = 1e-6,
    theta: float = 10_000.0,
) -> ModelSpec:
    """Return the spec of what all Llama-like configurations call by the same names; layers share one rope.

    `ropes`: already read. What follows is what the family means where the config does not say: `tied`: whether the
    head is the embedding; `norm_eps`; `theta` of the rope.
    """
    hidden_size, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    head_dim = config.integer("head_dim", hidden_size // n_heads)
    ropes = ropes or read_ropes(config, head_dim, default_theta=theta)
    if set(ropes) != {""}:
        raise config.error("rope_parameters", "a rope for each kind of layer is not implemented here")
    return ModelSpec(
        family=family,
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=config.integer("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=config.integer("num_key_value_heads", n_heads),
        head_dim=head_dim,
        max_positions=_reach(ropes[""], config.integer("max_position_embeddings")),
        layers=(LayerSpec(rope=ropes[""]),) * config.integer("num_hidden_layers"),
        norm_eps=config.number("rms_norm_eps", norm_eps),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        tied=config.flag("tie_word_embeddings", tied),
        attention_scale=1 / math.sqrt(head_dim),
        eos_token_ids=read_eos(config),
    )


def _reach(rope: RopeSpec, max_positions: int) -> int:
    """Return how many positions the model can tell apart: some scalings stretch what the config states."""
    if rope.kind == "dynamic":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


def read_dtype(config: Config) -> str:
    """Return the dtype of the weights, under its key of transformers 5 or 4."""
    return config.choice("dtype" if config.raw("dtype") is not None else "torch_dtype", _DTYPES, "float32")


def read_eos(config: Config) -> tuple[int, ...]:
    """Return the end-of-sequence ids: none, one or several."""
    key = config.first_of("eos_token_id", "eos_token_ids")
    config.raw("eos_token_id")
    try:
        return token_ids(config.raw(key))
    except ValueError as error:
        raise config.error(key, str(error)) from error


def read_spec(config: Config) -> ModelSpec:
    """Read a Llama config.json. Raises ModelError."""
    bias = config.flag("attention_bias", False)
    # The first conversions of Llama call the context by another name.
    config.fill("max_position_embeddings", config.raw("max_sequence_length"))
    spec = base_spec(config, "llama")
    return replace(spec, qkv_bias=bias, o_bias=bias, mlp_bias=config.flag("mlp_bias", False))


def refs(spec: ModelSpec) -> Refs:
    """Name Llama's tensors."""
    return standard_refs(spec)


FAMILY = Family("LlamaForCausalLM", "llama", read_spec, refs)
