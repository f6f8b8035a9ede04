"""StableLM: Llama with layer norms and a rope on a part of the head."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a StableLM config.json. Raises ModelError."""
    config.require("qk_layernorm", False)
    parallel = config.flag("use_parallel_residual", False)
    return replace(
        base_spec(config, "stablelm", partial=0.25),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        parallel_residual=parallel,
        shared_norm=parallel,
        qkv_bias=config.flag("use_qkv_bias", False),
    )


FAMILY = Family("StableLmForCausalLM", "stablelm", read_spec, standard_refs)
