"""Llama 2, 3 and 3.x: RMS norms, a rope, a gated MLP. Functions for the families derived from it."""

from __future__ import annotations

import math
from collections.abc import Mapping

from services.compute.backends.names import Activation
from services.compute.backends.shapes import ExpertRouting
from services.compute.model.families.config import MAX_INTEGER, MAX_LAYERS, Config
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.families.rope import read_ropes
from services.compute.model.files import token_ids
from services.compute.model.spec import LayerSpec, ModelSpec, MoeSpec, RopeSpec

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}
_DTYPES = {f"{module}{name}": name for module in ("", "torch.") for name in ("float32", "bfloat16", "float16")}


def base_spec(
    config: Config,
    family: str,
    *,
    ropes: dict[str, RopeSpec] | None = None,
    tied: bool = False,
    norm_eps: float = 1e-6,
    theta: float = 10_000.0,
    partial: float | None = None,
    attention_bias: bool | None = None,
    mlp_bias: bool | None = None,
    activation: str = "silu",
) -> ModelSpec:
    """Return the spec from the keys that all Llama-like configurations share; layers share one rope.

    `ropes` are ropes that were read already. The other arguments are the family's defaults for absent keys: `tied`
    (whether the head is the embedding), `norm_eps`, the rope's `theta`, `partial`, the rotated part of a head, the
    biases of attention and of MLPs (None: the key is not read), and the `activation`.
    """
    hidden_size, n_heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    given = config.raw("head_dim") is not None
    head_dim = config.integer("head_dim") if given else config.quotient("hidden_size", "num_attention_heads")
    n_kv_heads = config.integer("num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise config.error(
            "num_key_value_heads", f"expected a divisor of num_attention_heads {n_heads}, found {n_kv_heads}"
        )
    rope = one_rope(config, ropes or read_ropes(config, head_dim, default_theta=theta, partial=partial))
    bias = attention_bias is not None and config.flag("attention_bias", attention_bias)
    return ModelSpec(
        family=family,
        dtype=read_dtype(config),
        vocab_size=config.integer("vocab_size"),
        hidden_size=hidden_size,
        ffn_size=config.integer("intermediate_size"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        max_positions=_reach(config, rope),
        layers=(LayerSpec(rope=rope),) * config.integer("num_hidden_layers", at_most=MAX_LAYERS),
        norm_eps=config.number("rms_norm_eps", norm_eps),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=mlp_bias is not None and config.flag("mlp_bias", mlp_bias),
        activation=config.choice("hidden_act", ACTIVATIONS, activation),
        tied=config.flag("tie_word_embeddings", tied),
        attention_scale=1 / math.sqrt(head_dim),
        eos_token_ids=read_eos(config),
    )


def read_moe(config: Config, experts: str, *, ffn_size: int, normalise: bool) -> MoeSpec:
    """Return the mixture; the key `experts` holds its number of experts. Raises ModelError."""
    n_experts, n_active = config.integer(experts), config.integer("num_experts_per_tok")
    if n_active > n_experts:
        raise config.error(
            "num_experts_per_tok", f"expected {n_experts} at most, as many as {experts}, found {n_active}"
        )
    return MoeSpec(n_experts, ffn_size, ExpertRouting(n_active, normalise))


def one_rope(config: Config, ropes: dict[str, RopeSpec]) -> RopeSpec:
    """Return the rope that all layers share. Raises ModelError if layers have different ropes."""
    if set(ropes) != {""}:
        raise config.error("rope_parameters", "a rope for each kind of layer is not implemented here")
    return ropes[""]


def _reach(config: Config, rope: RopeSpec) -> int:
    """Return the model's number of positions; some rope scalings extend the config's number."""
    stated = config.integer("max_position_embeddings")
    stretched = {"dynamic": stated * rope.factor, "yarn": rope.original_max_positions * rope.factor}
    reach = max(stretched.get(rope.kind, stated), 1 if rope.kind == "dynamic" else stated)
    if reach > MAX_INTEGER:
        raise config.error("max_position_embeddings", f"{stated} is stretched too far by a factor of {rope.factor:g}")
    return int(reach)


def read_dtype(config: Config) -> str:
    """Return the dtype of the weights, from the key of transformers 5 or 4."""
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
    # The first conversions of Llama use another key for the context length.
    config.fill("max_position_embeddings", config.raw("max_sequence_length"))
    return base_spec(config, "llama", attention_bias=False, mlp_bias=False)


# The alias is the name in the first conversions.
FAMILY = Family("LlamaForCausalLM", "llama", read_spec, standard_refs, aliases=("LLaMAForCausalLM",))
