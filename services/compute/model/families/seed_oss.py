"""Seed-OSS: Llama with biases on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Seed-OSS config.json. Raises ModelError."""
    config.pass_over("residual_dropout")
    return replace(
        base_spec(config, "seed_oss"),
        qkv_bias=config.flag("attention_bias", True),
        o_bias=config.flag("attention_out_bias", False),
        mlp_bias=config.flag("mlp_bias", False),
    )


FAMILY = Family("SeedOssForCausalLM", "seed_oss", read_spec, standard_refs)
