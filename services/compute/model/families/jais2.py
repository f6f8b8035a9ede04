"""Jais 2: Llama with layer norms, biases everywhere, and a squared ReLU in place of the gate."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Jais 2 config.json. Raises ModelError."""
    spec = base_spec(config, "jais2", attention_bias=True, mlp_bias=True, activation="relu2")
    norm_eps = config.number("layer_norm_eps", 1e-5)
    return replace(spec, norm="layer", norm_eps=norm_eps, norm_bias=True, mlp="plain")


FAMILY = Family("Jais2ForCausalLM", "jais2", read_spec, standard_refs)
