"""Jais 2: Llama with layer norms, biases everywhere, and a squared ReLU in place of the gate."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import ACTIVATIONS, base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Jais 2 config.json. Raises ModelError."""
    bias = config.flag("attention_bias", True)
    return replace(
        base_spec(config, "jais2"),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", True),
        mlp="plain",
        activation=config.choice("hidden_act", ACTIVATIONS, "relu2"),
    )


FAMILY = Family("Jais2ForCausalLM", "jais2", read_spec, standard_refs)
