"""SmolLM 3: Llama with some layers without a rope (NoPE), every fourth one as published."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family, standard_refs
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a SmolLM 3 config.json. Raises ModelError."""
    for unused in ("pretraining_tp", "max_window_layers"):  # published, but without effect in this architecture
        config.raw(unused)
    spec = base_spec(config, "smollm3", tied=True, theta=2e6, attention_bias=False, mlp_bias=False)
    rotated = read_rotated(config, spec.n_layers)
    slides = config.flag("use_sliding_window", False) and config.raw("sliding_window") is not None
    default = [SLIDING if slides and not rotates else FULL for rotates in rotated]
    layers = with_windows(config, spec, read_layer_types(config, spec.n_layers, default))
    return replace(
        spec,
        layers=tuple(
            layer if rotates else replace(layer, rope=None) for layer, rotates in zip(layers, rotated, strict=True)
        ),
    )


def read_rotated(config: Config, n_layers: int) -> list[bool]:
    """Return for every layer whether it has a rope; in `no_rope_layers` 1 means a rope, despite the name."""
    interval, rotated = config.integer("no_rope_layer_interval", 4), config.raw("no_rope_layers")
    if rotated is None:
        return [(index + 1) % interval != 0 for index in range(n_layers)]
    if not isinstance(rotated, list) or len(rotated) < n_layers or any(rotates not in (0, 1) for rotates in rotated):
        raise config.error(
            "no_rope_layers", f"expected 0 or 1 for each of {n_layers} layers (num_hidden_layers), found {rotated!r}"
        )
    return [bool(rotates) for rotates in rotated[:n_layers]]


FAMILY = Family("SmolLM3ForCausalLM", "smollm3", read_spec, standard_refs)
