"""Kinds of layers of a config.json, and its sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.spec import LayerSpec, ModelSpec

SLIDING, FULL = "sliding_attention", "full_attention"


def read_kinds(
    config: Config, n_layers: int, known: Sequence[str], default: object = None, key: str = "layer_types"
) -> list[str]:
    """Return the kind of every layer, each of the `known` ones; `default` stands in for an absent key.

    Raises ModelError.
    """
    kinds = config.raw(key)
    kinds = default if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in known for kind in kinds):
        named = " or ".join(map(repr, known))
        raise config.error(key, f"expected num_hidden_layers {n_layers} times {named}, found {kinds!r}")
    return kinds


def read_layer_types(config: Config, n_layers: int, default: Sequence[str]) -> list[str]:
    """Return whether every layer slides; `default` is the family's default for an absent key. Raises ModelError."""
    return read_kinds(config, n_layers, (SLIDING, FULL), default)


def with_windows(config: Config, spec: ModelSpec, kinds: Sequence[str]) -> tuple[LayerSpec, ...]:
    """Return the layers with the config's window on the sliding ones. Raises ModelError."""
    if SLIDING not in kinds:
        config.raw("sliding_window")
        return spec.layers
    window: int | None = config.integer("sliding_window")
    if window is not None and window >= spec.max_positions:
        window = None  # the window covers all positions
    return tuple(
        replace(layer, window=window) if kind == SLIDING else layer
        for layer, kind in zip(spec.layers, kinds, strict=True)
    )


def same_window(config: Config, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Return the layers, all with the config's window if it has one. Raises ModelError."""
    kind = FULL if config.raw("sliding_window") is None else SLIDING
    return with_windows(config, spec, [kind] * spec.n_layers)
