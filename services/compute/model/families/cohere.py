"""Cohere Command R: attention and MLP read the same layer norm, interleaved rope, scaled logits."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import paired
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, Refs, standard_refs
from services.compute.model.spec import ModelSpec


def read_common(config: Config, family: str, theta: float) -> ModelSpec:
    """Return the spec of the keys that Command R and R 2 share. `theta`: the rope's, if absent. Raises ModelError."""
    config.require("use_qk_norm", False)
    return replace(
        base_spec(config, family, tied=True, theta=theta, attention_bias=False),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        parallel_residual=True,
        shared_norm=True,
        logit_scale=config.number("logit_scale", 0.0625),
    )


def read_spec(config: Config) -> ModelSpec:
    """Read a Command R config.json. Raises ModelError."""
    return read_common(config, "cohere", 500_000.0)


def refs(spec: ModelSpec) -> Refs:
    """Name Command R's tensors."""
    return paired(spec, standard_refs(spec))


FAMILY = Family("CohereForCausalLM", "cohere", read_spec, refs)
