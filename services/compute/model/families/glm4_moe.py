"""GLM 4.5 and 4.6: experts in groups and shared ones, a rope on half of the head."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.mixtures import with_grouped_experts
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a GLM 4.5 config.json. Raises ModelError."""
    spec = base_spec(config, "glm4_moe", norm_eps=1e-5, partial=0.5)
    return replace(
        spec,
        layers=with_grouped_experts(config, spec, dense=1, normalise=True),
        qk_norm="head" if config.flag("use_qk_norm", False) else None,
        qkv_bias=config.flag("attention_bias", False),
    )


FAMILY = Family("Glm4MoeForCausalLM", "glm4_moe", read_spec, standard_refs)
