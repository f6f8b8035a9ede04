"""Arcee (AFM): Llama with a squared ReLU in place of the gate."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read an Arcee config.json. Raises ModelError."""
    spec = base_spec(config, "arcee", norm_eps=1e-5, attention_bias=False, mlp_bias=False, activation="relu2")
    return replace(spec, mlp="plain")


FAMILY = Family("ArceeForCausalLM", "arcee", read_spec, standard_refs)
