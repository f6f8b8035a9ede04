"""Granite 4 hybrid: Granite with state-space layers (Mamba 2), and experts or an MLP alone."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.granite import read_granite
from services.compute.model.families.granitemoe import NAMES, with_stacked_experts
from services.compute.model.families.llama import read_moe
from services.compute.model.families.naming import Family, Refs, TensorRef, standard_refs
from services.compute.model.families.statespace import mixed_layers, read_mamba2, with_mamba2
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Granite 4 hybrid config.json. Raises ModelError."""
    config.require("position_embedding_type", "nope", "rope")
    config.pass_over("init_method", "normalization_function")
    rotates = config.raw("position_embedding_type") == "rope"
    spec = read_granite(config, "granitemoehybrid")
    shared = config.integer("shared_intermediate_size", 1024)
    layers = spec.layers
    if config.raw("num_local_experts") == 0:
        config.raw("num_experts_per_tok")
        spec = replace(spec, ffn_size=shared)
    else:
        moe = read_moe(config, "num_local_experts", ffn_size=spec.ffn_size, normalise=True)
        layers = tuple(replace(layer, moe=replace(moe, shared_size=shared)) for layer in layers)
    if not rotates:
        layers = tuple(replace(layer, rope=None) for layer in layers)
    spec = replace(spec, layers=layers)
    return replace(spec, layers=mixed_layers(config, spec, read_mamba2(config, spec.hidden_size)))


def refs(spec: ModelSpec) -> Refs:
    """Name Granite 4 hybrid's tensors: the shared MLP's gate and up are one tensor."""
    refs = with_mamba2(spec, with_stacked_experts(spec, standard_refs(spec, NAMES)), "model.layers.{}.mamba.")
    for index, layer in enumerate(spec.layers):
        key, module = f"layers.{index}.", f"model.layers.{index}.shared_mlp."
        size = spec.ffn_size if layer.moe is None else layer.moe.shared_size
        key += "" if layer.moe is None else "shared."
        refs[f"{key}gate"] = TensorRef(f"{module}input_linear.weight", n_stored=2 * size)
        refs[f"{key}up"] = TensorRef(f"{module}input_linear.weight", start=size, n_stored=2 * size)
        refs[f"{key}down"] = TensorRef(f"{module}output_linear.weight")
    return refs


FAMILY = Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", read_spec, refs, stacked=None)
