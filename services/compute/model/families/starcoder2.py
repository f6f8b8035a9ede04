"""StarCoder 2: layer norms and biases everywhere, an MLP without a gate, a sliding window on every layer."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, standard_refs
from services.compute.model.families.windows import same_window
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(up="mlp.c_fc", down="mlp.c_proj")


def read_spec(config: Config) -> ModelSpec:
    """Read a StarCoder 2 config.json. Raises ModelError."""
    config.require("norm_type", "layer_norm")
    config.require("mlp_type", "default")
    # Keys of its first implementation, derived from GPT BigCode.
    config.pass_over("activation_function", "layer_norm_epsilon", "scale_attn_weights")
    config.pass_over("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
    config.pass_over("residual_dropout", "embedding_dropout")
    bias = config.flag("use_bias", True)
    spec = base_spec(config, "starcoder2", tied=True, activation="gelu_pytorch_tanh")
    return replace(
        spec,
        layers=same_window(config, spec),
        norm="layer",
        norm_eps=config.number("norm_epsilon", 1e-5),
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        mlp="plain",
    )


FAMILY = Family("Starcoder2ForCausalLM", "starcoder2", read_spec, partial(standard_refs, names=_NAMES))
