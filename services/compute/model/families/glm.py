"""GLM 4 (9B) and GLM 4 0414: interleaved rope on half of the head, gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import concatenated, in_layers, paired
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import STANDARD, Family, LayerNames, Refs, standard_refs
from services.compute.model.spec import ModelSpec

_SANDWICH = LayerNames(attn_post_norm="post_self_attn_layernorm", mlp_post_norm="post_mlp_layernorm")


def read_glm(config: Config) -> ModelSpec:
    """Read a GLM 4 config.json. Raises ModelError."""
    return _common(config, "glm")


def read_glm4(config: Config) -> ModelSpec:
    """Read a GLM 4 0414 config.json, whose layers also have norms after attention and MLP. Raises ModelError."""
    return replace(_common(config, "glm4"), post_norm=True)


def _common(config: Config, family: str) -> ModelSpec:
    spec = base_spec(config, family, norm_eps=1.5625e-07, partial=0.5, attention_bias=True)
    return replace(spec, o_bias=False)


def refs(spec: ModelSpec) -> Refs:
    """Name the tensors of both."""
    halves = dict.fromkeys(("gate", "up"), spec.ffn_size)
    fused = in_layers(spec, lambda i: concatenated(f"model.layers.{i}.mlp.gate_up_proj", halves))
    return paired(spec, standard_refs(spec, _SANDWICH if spec.post_norm else STANDARD) | fused)


GLM = Family("GlmForCausalLM", "glm", read_glm, refs)
GLM4 = Family("Glm4ForCausalLM", "glm4", read_glm4, refs)
