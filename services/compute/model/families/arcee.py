"""Arcee (AFM): Llama with a squared ReLU in place of the gate."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import ACTIVATIONS, base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read an Arcee config.json. Raises ModelError."""
    bias = config.flag("attention_bias", False)
    return replace(
        base_spec(config, "arcee", norm_eps=1e-5),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=config.flag("mlp_bias", False),
        mlp="plain",
        activation=config.choice("hidden_act", ACTIVATIONS, "relu2"),
    )


FAMILY = Family("ArceeForCausalLM", "arcee", read_spec, standard_refs)
