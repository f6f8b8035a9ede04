"""Nemotron (Minitron): layer norms that add one to their weight, a squared ReLU in place of the gate."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Nemotron config.json. Raises ModelError."""
    for key in ("rope_percent", "rope_percentage"):  # other names of partial_rotary_factor
        config.require(key, config.raw("partial_rotary_factor"))
    spec = base_spec(config, "nemotron", partial=0.5, attention_bias=False, mlp_bias=False, activation="relu2")
    norm_eps = config.number("norm_eps", 1e-5)
    return replace(spec, norm="layer", norm_eps=norm_eps, norm_bias=True, norm_offset=1.0, mlp="plain")


FAMILY = Family("NemotronForCausalLM", "nemotron", read_spec, standard_refs)
