"""dots.llm1: experts in groups and shared ones, normalised q and k, a window on the last layers."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.mixtures import with_grouped_experts
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a dots.llm1 config.json. Raises ModelError."""
    spec = base_spec(config, "dots1", attention_bias=False)
    slides = config.raw("sliding_window") is not None
    first = config.integer("max_window_layers", spec.n_layers)
    default = [SLIDING if slides and index >= first else FULL for index in range(spec.n_layers)]
    layers = with_windows(config, spec, read_layer_types(config, spec.n_layers, default))
    spec = replace(spec, layers=layers, qk_norm="head")
    return replace(spec, layers=with_grouped_experts(config, spec, dense=0, normalise=False))


FAMILY = Family("Dots1ForCausalLM", "dots1", read_spec, standard_refs)
