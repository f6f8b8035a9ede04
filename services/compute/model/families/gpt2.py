"""GPT-2: learned positions, layer norm, weights stored [in, out]."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import concatenated, in_layers
from services.compute.model.families.naming import UNUSED, Family, LayerNames, Refs, TensorRef, standard_refs
from services.compute.model.families.plain import GPT_SPELLING, plain_spec
from services.compute.model.spec import ModelSpec

_NAMES = LayerNames(o="attn.c_proj", up="mlp.c_fc", down="mlp.c_proj", attn_norm="ln_1", mlp_norm="ln_2")


def read_spec(config: Config) -> ModelSpec:
    """Read a GPT-2 config.json. Raises ModelError."""
    config.require("scale_attn_by_inverse_layer_idx", False)
    spec = plain_spec(config, "gpt2", GPT_SPELLING, activation="gelu_new")
    scale = spec.attention_scale if config.flag("scale_attn_weights", True) else 1.0
    return replace(spec, learned_positions=True, attention_scale=scale)


def body_refs(spec: ModelSpec, names: LayerNames = _NAMES) -> Refs:
    """Name the tensors of GPT-2 and of the models that followed it: q, k and v are one module in each layer."""
    prefix = "transformer."
    refs = standard_refs(spec, names, prefix=f"{prefix}h.", embed=f"{prefix}wte", norm=f"{prefix}ln_f", head="lm_head")
    if spec.learned_positions:
        refs["positions"] = TensorRef(f"{prefix}wpe.weight")
    return refs


def refs(spec: ModelSpec) -> Refs:
    """Name GPT-2's tensors: q, k and v are one tensor, and linear weights are transposed."""
    sizes = dict.fromkeys("qkv", spec.hidden_size)
    fused = in_layers(spec, lambda i: concatenated(f"transformer.h.{i}.attn.c_attn", sizes, bias=True))
    refs = body_refs(spec) | fused
    for key in (f"layers.{i}.{part}" for i in range(spec.n_layers) for part in ("q", "k", "v", "o", "up", "down")):
        refs[key] = replace(refs[key], transposed=True)
    return refs


# The first checkpoints were stored without "transformer."; attn.bias is the causal mask.
FAMILY = Family(
    "GPT2LMHeadModel",
    "gpt2",
    read_spec,
    refs,
    (*UNUSED, "*.attn.bias", "*.attn.masked_bias"),
    optional_prefix="transformer.",
    base="GPT2Model",
    spelling=GPT_SPELLING,
)
