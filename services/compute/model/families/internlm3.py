"""InternLM 3: Llama with a bias on all linear layers, or on none, and one on q, k and v."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read an InternLM 3 config.json. Raises ModelError."""
    bias = config.flag("bias", False)
    spec = base_spec(config, "internlm3")
    return replace(spec, qkv_bias=config.flag("qkv_bias", False), o_bias=bias, mlp_bias=bias)


FAMILY = Family("InternLM3ForCausalLM", "internlm3", read_spec, standard_refs)
