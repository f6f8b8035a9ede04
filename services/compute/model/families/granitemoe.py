"""Granite MoE: Granite with a mixture of experts in every layer."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.granite import read_granite
from services.compute.model.families.llama import read_moe
from services.compute.model.families.naming import Family, LayerNames, Refs, StackedNames, TensorRef, standard_refs
from services.compute.model.spec import ModelSpec

_MODULE = "block_sparse_moe."
NAMES = LayerNames(router=f"{_MODULE}router.layer")


def read_spec(config: Config) -> ModelSpec:
    """Read a Granite MoE config.json. Raises ModelError."""
    spec = read_granite(config, "granitemoe")
    # A softmax over the chosen ones is one over all, divided by their sum.
    moe = read_moe(config, "num_local_experts", ffn_size=spec.ffn_size, normalise=True)
    return replace(spec, layers=tuple(replace(layer, moe=moe) for layer in spec.layers))


def with_stacked_experts(spec: ModelSpec, refs: Refs) -> Refs:
    """Return `refs` with the experts of each mixture, which are two tensors."""
    for index, layer in enumerate(spec.layers):
        if layer.moe is None:
            continue
        module, n, ffn = f"model.layers.{index}.{_MODULE}", layer.moe.n_experts, layer.moe.ffn_size
        for expert in range(n):
            key, name = f"layers.{index}.experts.{expert}.", f"{module}input_linear.weight"
            refs[f"{key}gate"] = TensorRef(name, n_stored=2 * ffn, place=expert, n_stacked=n)
            refs[f"{key}up"] = TensorRef(name, start=ffn, n_stored=2 * ffn, place=expert, n_stacked=n)
            refs[f"{key}down"] = TensorRef(f"{module}output_linear.weight", place=expert, n_stacked=n)
    return refs


def refs(spec: ModelSpec) -> Refs:
    """Name Granite MoE's tensors."""
    return with_stacked_experts(spec, standard_refs(spec, NAMES))


FAMILY = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    read_spec,
    refs,
    stacked=StackedNames(f"{_MODULE}router", f"{_MODULE}experts"),
)
