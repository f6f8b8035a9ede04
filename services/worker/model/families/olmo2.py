"""OLMo 2: norms after attention and MLP only, q and k normalised over all heads."""

from __future__ import annotations

from dataclasses import replace

from services.worker.model.families.config import Config
from services.worker.model.families.llama import base_spec
from services.worker.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.worker.model.spec import ModelSpec

_NAMES = LayerNames(attn_post_norm="post_attention_layernorm", mlp_post_norm="post_feedforward_layernorm")


def read_spec(config: Config) -> ModelSpec:
    """Read an OLMo 2 config.json. Raises ModelError."""
    bias = config.flag("attention_bias", False)
    spec = base_spec(config, "olmo2", norm_eps=1e-5)
    return replace(spec, pre_norm=False, post_norm=True, qk_norm="full", qkv_bias=bias, o_bias=bias)


def refs(spec: ModelSpec) -> Refs:
    """Name OLMo 2's tensors."""
    return standard_refs(spec, _NAMES)


FAMILY = Family("Olmo2ForCausalLM", "olmo2", read_spec, refs)
