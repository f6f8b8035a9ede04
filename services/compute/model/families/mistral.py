"""Mistral: Llama with a sliding window on every layer. Ministral 3: queries grow with the logarithm of positions."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config, is_positive
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.families.windows import same_window
from services.compute.model.spec import ModelSpec, QueryScale


def read_spec(config: Config) -> ModelSpec:
    """Read a Mistral config.json. Raises ModelError."""
    spec = base_spec(config, "mistral")
    return replace(spec, layers=same_window(config, spec))


def read_ministral3(config: Config) -> ModelSpec:
    """Read a Ministral 3 config.json. Raises ModelError."""
    settings = config.raw("rope_parameters")
    if not isinstance(settings, dict):
        raise config.error("rope_parameters", f"expected an object, found {settings!r}")
    rope = {key: value for key, value in settings.items() if key not in ("llama_4_scaling_beta", "type")}
    rope.pop("max_position_embeddings", None)  # repeats the key outside
    config.override("rope_parameters", {"rope_type": settings.get("type", "default")} | rope)
    spec = base_spec(config, "ministral3", norm_eps=1e-5, theta=1e6)
    beta, period, scale = settings.get("llama_4_scaling_beta"), spec.ropes[0].original_max_positions, None
    if beta is not None:
        if not is_positive(beta) or not period:
            problem = f"expected a number above 0 with original_max_position_embeddings, found {beta!r}"
            raise config.error("rope_parameters", f"llama_4_scaling_beta: {problem}")
        scale = QueryScale(float(beta), period)
    layers = same_window(config, spec)
    return replace(spec, layers=tuple(replace(layer, query_scale=scale) for layer in layers))


FAMILY = Family("MistralForCausalLM", "mistral", read_spec, standard_refs)
MINISTRAL3 = Family("Ministral3ForCausalLM", "ministral3", read_ministral3, standard_refs)
