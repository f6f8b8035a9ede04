"""EXAONE 4: norms after attention and MLP; if some layers have a window, the others have no rope."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import base_spec
from services.compute.model.families.naming import Family
from services.compute.model.families.olmo2 import refs
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import ModelSpec


def read_spec(config: Config) -> ModelSpec:
    """Read an EXAONE 4 config.json. Raises ModelError."""
    config.pass_over("rope_layers_on_global")
    spec = base_spec(config, "exaone4", norm_eps=1e-5)
    slides = config.raw("sliding_window") is not None
    config.pass_over("sliding_window_pattern")  # without a window it means nothing
    kinds = read_layer_types(
        config, spec.n_layers, _pattern(config, spec.n_layers) if slides else [FULL] * spec.n_layers
    )
    layers = with_windows(config, spec, kinds)
    layers = tuple(
        replace(layer, rope=None) if slides and kind == FULL else layer
        for layer, kind in zip(layers, kinds, strict=True)
    )
    return replace(spec, layers=layers, pre_norm=False, post_norm=True, qk_norm="head")


def _pattern(config: Config, n_layers: int) -> list[str]:
    """The kinds of layers by sliding_window_pattern: a period, or letters (L for local); the last layer is global."""
    pattern = config.raw("sliding_window_pattern")
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        kinds = [SLIDING if pattern[index % len(pattern)] == "L" else FULL for index in range(n_layers)]
        return [*kinds[:-1], FULL]
    period = config.integer("sliding_window_pattern", 4)
    return [FULL if (index + 1) % period == 0 else SLIDING for index in range(n_layers)]


FAMILY = Family("Exaone4ForCausalLM", "exaone4", read_spec, refs)
