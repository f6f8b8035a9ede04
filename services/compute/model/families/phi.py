"""Phi 1, 1.5 and 2: attention and MLP read the same norm, biases everywhere, a rope on a part of the head."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, LayerNames, standard_refs
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(o="self_attn.dense", up="mlp.fc1", down="mlp.fc2")


def read_spec(config: Config) -> ModelSpec:
    """Read a Phi config.json. Raises ModelError."""
    config.require("qk_layernorm", False)
    return replace(
        base_spec(config, "phi", partial=0.5, activation="gelu_new"),
        norm="layer",
        norm_eps=config.number("layer_norm_eps", 1e-5),
        norm_bias=True,
        parallel_residual=True,
        shared_norm=True,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        head_bias=True,
        mlp="plain",
    )


FAMILY = Family("PhiForCausalLM", "phi", read_spec, partial(standard_refs, names=_NAMES, norm="model.final_layernorm"))
