"""BitNet b1.58: Llama with a squared ReLU in its gate, and norms before the projections o and down."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, Refs, TensorRef, standard_refs
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a BitNet config.json. Raises ModelError."""
    spec = base_spec(config, "bitnet", norm_eps=1e-5, theta=500_000.0, attention_bias=False, activation="relu2")
    return replace(spec, sub_norm=True)


def refs(spec: ModelSpec) -> Refs:
    """Name BitNet's tensors."""
    refs = standard_refs(spec)
    for index in range(spec.n_layers):
        key, module = f"layers.{index}.", f"model.layers.{index}."
        refs[f"{key}o_norm"] = TensorRef(f"{module}self_attn.attn_sub_norm.weight")
        refs[f"{key}down_norm"] = TensorRef(f"{module}mlp.ffn_sub_norm.weight")
    return refs


# The alias is the name in the code that the weights were published with.
FAMILY = Family("BitNetForCausalLM", "bitnet", read_spec, refs, aliases=("BitnetForCausalLM",))
