"""Cohere Command R7B and A: Command R in which every fourth layer has neither a window nor a rope."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.cohere import read_common, refs
from services.compute.model.families.config import Config
from services.compute.model.families.naming import Family
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read a Command R7B config.json. Raises ModelError."""
    # Options of its first program for another computation.
    for key in ("use_embedding_sharing", "use_gated_activation", "use_parallel_block", "use_parallel_embedding"):
        config.require(key, True)
    config.require("position_embedding_type", "rope_gptj")
    config.require("order_of_interleaved_layers", "local_attn_first")
    config.require("rotary_pct", 1)
    spec = read_common(config, "cohere2", 10_000.0)
    period = config.integer(config.first_of("layer_switch", "_sliding_window_pattern", "sliding_window_pattern"), 4)
    config.pass_over("sliding_window_pattern")
    default = [SLIDING if (index + 1) % period else FULL for index in range(spec.n_layers)]
    kinds = read_layer_types(config, spec.n_layers, default)
    layers = with_windows(config, spec, kinds)
    return replace(
        spec,
        layers=tuple(
            layer if kind == SLIDING else replace(layer, rope=None) for layer, kind in zip(layers, kinds, strict=True)
        ),
    )


FAMILY = Family("Cohere2ForCausalLM", "cohere2", read_spec, refs)
