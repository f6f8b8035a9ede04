"""Names of projections and experts that are stored together, or in another order than they are computed in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from services.compute.model.families.naming import Refs, StackedNames, TensorRef
from services.compute.model.spec import ModelSpec


def concatenated(stored: str, sizes: Mapping[str, int], *, bias: bool = False) -> Refs:
    """Return the references of projections of these sizes, which are rows of the module `stored`, one after another."""
    refs: Refs = {}
    start, total = 0, sum(sizes.values())
    for part, size in sizes.items():
        refs[part] = TensorRef(f"{stored}.weight", start=start, n_stored=total)
        if bias:
            refs[f"{part}.bias"] = TensorRef(f"{stored}.bias", start=start, n_stored=total)
        start += size
    return refs


def by_kv_head(stored: str, spec: ModelSpec) -> Refs:
    """Return the references of q, k and v if the module `stored` holds, for each KV head, its q heads, k and v."""
    refs: Refs = {}
    group = spec.n_heads // spec.n_kv_heads
    for part, place, n_units in (("q", 0, group), ("k", group, 1), ("v", group + 1, 1)):
        ref = TensorRef(f"{stored}.weight", unit=spec.head_dim, part=place, n_units=n_units, n_parts=group + 2)
        refs[part] = ref
        if spec.qkv_bias:
            refs[f"{part}.bias"] = replace(ref, name=f"{stored}.bias")
    return refs


def in_layers(spec: ModelSpec, refs_of: Callable[[int], Refs]) -> Refs:
    """Return the references that `refs_of` gives for the index of each layer."""
    return {f"layers.{index}.{key}": ref for index in range(spec.n_layers) for key, ref in refs_of(index).items()}


def paired(spec: ModelSpec, refs: Refs) -> Refs:
    """Return `refs` of a model with an interleaved rope: q and k are read in rotate-half order."""
    paired_refs = dict(refs)
    for index, layer in enumerate(spec.layers):
        for part in ("q", "k", "q.bias", "k.bias"):
            key = f"layers.{index}.{part}"
            if layer.rope is not None and key in paired_refs:
                paired_refs[key] = replace(paired_refs[key], unit=spec.head_dim, n_paired=layer.rope.rotary_dim)
    return paired_refs


Shape = Callable[[str], tuple[int, ...]]  # stored shape by name; () for absent tensors


def stacked_refs(
    spec: ModelSpec, names: StackedNames | None, shape: Shape = lambda _: (), prefix: str = "model.layers."
) -> Refs:
    """Return the references of mixtures in the form of transformers 5: the experts of a layer are one tensor.

    transformers 4 stored the matrices of some architectures as [in, out], under the same names: `shape` shows which.
    """
    refs: Refs = {}
    if names is None:
        return refs
    for index, moe in ((index, layer.moe) for index, layer in enumerate(spec.layers) if layer.moe is not None):
        key, module = f"layers.{index}.", f"{prefix}{index}."
        refs[f"{key}router"] = TensorRef(f"{module}{names.router}.weight")
        n, size, both, parts = moe.n_experts, spec.hidden_size, 2 * moe.ffn_size, f"{module}{names.experts}."
        stored = (shape(f"{parts}gate_up_proj"), shape(f"{parts}down_proj"))
        stack = TensorRef(parts, stored == ((n, size, both), (n, moe.ffn_size, size)), n_stacked=n)
        gate_up, down = replace(stack, name=f"{parts}gate_up_proj", n_stored=both), f"{parts}down_proj"
        for expert in range(n):
            refs[f"{key}experts.{expert}.gate"] = replace(gate_up, place=expert)
            refs[f"{key}experts.{expert}.up"] = replace(gate_up, place=expert, start=moe.ffn_size)
            refs[f"{key}experts.{expert}.down"] = replace(stack, name=down, place=expert)
    if names.dense:
        for index in (index for index, layer in enumerate(spec.layers) if layer.moe is None):
            for part in ("gate", "up", "down"):
                refs[f"layers.{index}.{part}"] = TensorRef(f"{prefix}{index}.{names.dense}.{part}_proj.weight")
    return refs
