"""Apertus: Llama without a gate, with xIELU, whose numbers each layer stores, and normalised q and k."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import UNUSED, Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.families.rope import fill_rope
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(attn_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}  # fmt: skip
_NUMBERS = ("alpha_p", "alpha_n", "beta")


def read_spec(config: Config) -> ModelSpec:
    """Read an Apertus config.json. Raises ModelError."""
    fill_rope(config, _ROPE)
    config.require("post_norm", False)
    config.require("qk_norm", True)
    spec = base_spec(config, "apertus", norm_eps=1e-5, theta=12e6, attention_bias=False, activation="xielu")
    return replace(spec, mlp="plain", qk_norm="head")


def refs(spec: ModelSpec) -> Refs:
    """Name Apertus' tensors."""
    refs = standard_refs(spec, _NAMES)
    for index in range(spec.n_layers if spec.activation == "xielu" else 0):
        module = f"model.layers.{index}.mlp.act_fn."
        refs |= {f"layers.{index}.{number}": TensorRef(f"{module}{number}") for number in _NUMBERS}
    return refs


# The last number bounds where the exponential of numbers near 0 is computed.
FAMILY = Family("ApertusForCausalLM", "apertus", read_spec, refs, (*UNUSED, "*.mlp.act_fn.eps"))
