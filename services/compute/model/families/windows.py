"""Sliding windows of a config.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.spec import LayerSpec, ModelSpec

SLIDING, FULL = "sliding_attention", "full_attention"


def read_layer_types(config: Config, n_layers: int, default: Sequence[str]) -> list[str]:
    """Return the kind of every layer; `default` is the family's default for an absent key. Raises ModelError."""
    kinds = config.raw("layer_types")
    kinds = list(default) if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in (SLIDING, FULL) for kind in kinds):
        raise config.error(
            "layer_types", f"expected num_hidden_layers {n_layers} times {SLIDING!r} or {FULL!r}, found {kinds!r}"
        )
    return kinds


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
