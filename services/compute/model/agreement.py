"""Compares a config.json with the stored tensors before tensors are read or memory is allocated."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.fused import stacked_refs
from services.compute.model.families.naming import Family, Refs
from services.compute.model.families.sizes import EXPERTS, logical_shape, read_shapes
from services.compute.model.formats.stored import StoredTensors
from services.compute.model.loading.checkpoint import Checkpoint
from services.compute.model.spec import ModelError, ModelSpec


def check_counts(config: Config, family: Family, spec: ModelSpec, n_drafts: int, files: StoredTensors) -> None:
    """Raise ModelError unless `files` store as many layers and experts as the config says.

    `n_drafts` more layers may be stored after the last one.
    """
    names = files.names
    firsts = {layer.block is not None: index for index, layer in reversed([*enumerate(spec.layers)])}
    stored = (_numbers(family, _first_refs(family, spec, i), f"layers.{i}.", names) for i in firsts.values())
    n_stored = len(set[str]().union(*stored))
    if n_stored and not spec.n_layers <= n_stored <= spec.n_layers + n_drafts:
        key = family.spelling.get("num_hidden_layers", "num_hidden_layers")
        raise config.error(key, f"{spec.n_layers}, but {n_stored} layers are stored")
    index, moe = next(((i, layer.moe) for i, layer in enumerate(spec.layers) if layer.moe is not None), (0, None))
    if moe is None:
        return
    refs, key = _first_refs(family, spec, index), f"layers.{index}.experts.0."
    n_stored = len(_numbers(family, refs, key, names)) if refs[f"{key}down"].place is None else 0
    n_stored = n_stored or _count_stacked(family, spec, index, files)
    if n_stored and n_stored != moe.n_experts:
        key = next(key for key in EXPERTS if config.raw(key) == moe.n_experts)
        raise config.error(key, f"{moe.n_experts}, but {n_stored} experts are stored in layer {index}")


def check_shapes(config: Config, family: Family, spec: ModelSpec, source: Checkpoint) -> None:
    """Raise ModelError if the shape of a tensor of `source` differs from the config."""
    shapes = read_shapes(config, family, spec)
    rows: dict[str, dict[str, None]] = defaultdict(dict)  # by tensor, the config's keys that determine its rows
    for key in source:
        rows[source.name(key)] |= dict.fromkeys(logical_shape(key, shapes)[0].keys)
    for key in source:
        shape = logical_shape(key, shapes)
        stored = source.stored_shape(key, tuple(size.value for size in shape))
        if stored.actual == stored.wanted:
            continue
        by_dimension = [tuple(rows[source.name(key)]), *(size.keys for size in shape[1:])]
        if stored.transposed:
            by_dimension.reverse()
        if len(stored.wanted) > len(shape):  # the experts of a layer, stacked
            by_dimension.insert(0, shapes["router"][0].keys)
        keys = dict.fromkeys(
            name
            for index, names in enumerate(by_dimension)
            if len(stored.actual) != len(stored.wanted) or stored.actual[index] != stored.wanted[index]
            for name in names
        )
        deciding = " and ".join(f"{name} ({config.raw(name)!r})" for name in keys)
        raise ModelError(
            f"{stored.file}: {stored.name}: expected shape {list(stored.wanted)}, found {list(stored.actual)}; "
            f"{deciding} of {config.file.name} decide the first"
        )


def _first_refs(family: Family, spec: ModelSpec, index: int) -> Refs:
    """Return the references of the layers up to `index` with one expert each: the config's counts may be absurd."""
    return family.refs(_with_one_expert(spec, index))


def _with_one_expert(spec: ModelSpec, index: int) -> ModelSpec:
    layers = (replace(layer, moe=layer.moe and replace(layer.moe, n_experts=1)) for layer in spec.layers[: index + 1])
    return replace(spec, layers=tuple(layers))


def _count_stacked(family: Family, spec: ModelSpec, index: int, files: StoredTensors) -> int:
    """Count the experts of a layer that are stored as one tensor; 0 if they are not."""
    key, one = f"layers.{index}.experts.0.down", _with_one_expert(spec, index)
    names = [refs[key].name for refs in (stacked_refs(one, family.stacked), family.refs(one)) if key in refs]
    names += [name.removeprefix(family.optional_prefix) for name in names]
    stored = next((name for name in names if name in files.names), None)
    return 0 if stored is None else files.shape(stored)[0]


def _numbers(family: Family, refs: Refs, key: str, names: Collection[str]) -> set[str]:
    """Return the numbers in `names` in the place of the last one of `key`, for any form of storage."""
    modules = (
        ref.name.rpartition(".")[0].removeprefix(family.optional_prefix)
        for name, ref in refs.items()
        if name.startswith(key) and name.count(".experts.") == key.count(".experts.")
    )
    number = key.split(".")[-2]
    places = [module.rpartition(f".{number}.") for module in modules]
    before, after = {place[0] for place in places}, {place[2] for place in places}
    any_of = ["|".join(map(re.escape, sorted(parts))) for parts in (before, after)]
    place = re.compile(rf"(?:{re.escape(family.optional_prefix)})?(?:{any_of[0]})\.(\d+)\.(?:{any_of[1]})\.[^.]+")
    return {match[1] for stored in names if (match := place.fullmatch(stored))}
