"""Qwen 2.5 VL and Qwen 3 VL: Qwen 2 or 3, with a tower for images of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from services.compute.model.families import qwen
from services.compute.model.families.config import MAX_LAYERS, Config
from services.compute.model.families.llama import ACTIVATIONS
from services.compute.model.families.multimodal import multimodal_family
from services.compute.model.families.naming import TEXT_PREFIXES, Family
from services.compute.model.families.rope import as_usual_rope
from services.compute.model.files import image_settings, pixel_bounds
from services.compute.model.spec import ModelError, ModelSpec
from services.compute.model.vision import VisionSpec

_NORM_EPS = 1e-6
_PREFIXES = (("model.visual.", "visual."), *TEXT_PREFIXES)
# Settings of videos and of training, and what the projection says as well.
_UNUSED = ("tokens_per_second", "spatial_patch_size", "out_hidden_size")
_ROPES = tuple({"rope_type": kind, "rope_theta": 10_000.0} for kind in ("axial", "default"))
_MOST_PATCHES = 1 << 16
# Defaults of transformers for absent keys.
_TOWER2_5: Mapping[str, Any] = {
    "depth": 32,
    "hidden_size": 3584,
    "hidden_act": "silu",
    "intermediate_size": 3420,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_TOWER3: Mapping[str, Any] = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}


def _vision(config: Config, *, windowed: bool) -> VisionSpec | None:
    """Read the tower; None for a folder that does not say how images are prepared. Raises ModelError."""
    settings = image_settings(config.file.parent)
    if config.raw("vision_config") is None or settings is None:
        return None
    tower = config.section("vision_config")
    for key, value in (_TOWER2_5 if windowed else _TOWER3).items():
        tower.fill(key, value)
    tower.pass_over(*_UNUSED)
    for key, allowed in (("in_channels", 3), ("in_chans", 3), ("temporal_patch_size", 2)):
        tower.require(key, allowed)
    tower.require("rope_parameters", *_ROPES)
    hidden, heads = tower.integer("hidden_size"), tower.integer("num_heads", 16)
    if hidden % (4 * heads):
        raise tower.error("num_heads", f"expected a divisor of hidden_size {hidden} whose quotient divides by 4")
    patch, square = tower.integer("patch_size"), tower.integer("spatial_merge_size", 2)
    most = pixel_bounds(*settings)[1] // patch**2
    if not square**2 <= most <= _MOST_PATCHES:
        raise ModelError(f"{settings[0]}: max_pixels: expected {square**2} to {_MOST_PATCHES} patches, found {most}")
    vision = VisionSpec(
        layout="qwen2_5_vl",
        image_token=config.integer("image_token_id", 151_655),
        frame_size=0,
        patch_size=patch,
        square=square,
        hidden_size=hidden,
        ffn_size=tower.integer("intermediate_size"),
        n_heads=heads,
        n_layers=tower.integer("depth", at_most=MAX_LAYERS),
        activation=tower.choice("hidden_act", ACTIVATIONS),
        norm_eps=_NORM_EPS,
        tower="visual.",
        most_patches=most,
    )
    if windowed:
        window, full = tower.integer("window_size") // patch // square, _layers(tower, "fullatt_block_indexes")
        return replace(vision, window=max(1, window), full_layers=full)
    return replace(vision, table_side=_table_side(tower), deep_layers=_deep_layers(tower, vision))


def _layers(tower: Config, key: str) -> tuple[int, ...]:
    """Return numbers of layers. Raises ModelError."""
    layers = tower.raw(key)
    if not isinstance(layers, list) or not all(type(one) is int for one in layers):
        raise tower.error(key, f"expected a list of numbers of layers, found {layers!r}")
    return tuple(layers)


def _table_side(tower: Config) -> int:
    """Return the side of the table of positions. Raises ModelError."""
    n = tower.integer("num_position_embeddings")
    if math.isqrt(n) ** 2 != n:
        raise tower.error("num_position_embeddings", f"expected the square of a number, found {n}")
    return math.isqrt(n)


def _deep_layers(tower: Config, vision: VisionSpec) -> tuple[int, ...]:
    """Return the layers whose squares become rows besides those of the last one. Raises ModelError."""
    key = "deepstack_visual_indexes"
    layers = _layers(tower, key)
    if list(layers) != sorted(set(layers) & set(range(vision.n_layers))):
        raise tower.error(key, f"expected ascending numbers of layers below depth {vision.n_layers}, found {[*layers]}")
    return layers


def _axes(config: Config, *, interleaved: bool) -> tuple[int, ...]:
    """Return what each pair of a head turns by: one after another in sections, or in turns. Raises ModelError."""
    text = config.raw("text_config")
    values = text if isinstance(text, dict) else config.values
    ropes = [values[key] for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), dict)]
    for rope in ropes:
        if rope.get("mrope_interleaved", interleaved) is not interleaved:
            raise config.error("mrope_interleaved", f"expected {str(interleaved).lower()} for this architecture")
    default = [24, 20, 20] if interleaved else [16, 24, 24]
    sections = next((rope["mrope_section"] for rope in ropes if "mrope_section" in rope), default)
    if not isinstance(sections, list) or len(sections) != 3 or not all(type(one) is int for one in sections):
        raise config.error("mrope_section", f"expected three numbers of pairs, found {sections!r}")
    if interleaved:
        return tuple(pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections)))
    return tuple(axis for axis, n_pairs in enumerate(sections) for _ in range(n_pairs))


def _family(
    architecture: str,
    model_type: str,
    texts: Mapping[str, Family],
    prepare: Callable[[Config], None] = as_usual_rope,
    *,
    windowed: bool,
) -> Family:
    """Return a family whose ropes turn by places in images if there is a tower; `windowed`: that of Qwen 2.5 VL."""
    vision = partial(_vision, windowed=windowed)
    family = multimodal_family(architecture, model_type, texts, prepare, vision, _PREFIXES)

    def read_spec(config: Config) -> ModelSpec:
        axes, spec = _axes(config, interleaved=not windowed), family.read_spec(config)
        if spec.vision is None:
            return spec
        _check_deep(config, spec, spec.vision)
        layers = []
        for layer in spec.layers:
            if layer.rope is None or len(axes) != layer.rope.rotary_dim // 2:
                raise config.error("mrope_section", f"expected pairs of a whole head in sum, found {len(axes)}")
            layers.append(replace(layer, rope=replace(layer.rope, axes=axes)))
        return replace(spec, layers=tuple(layers))

    return replace(family, read_spec=read_spec)


def _check_deep(config: Config, spec: ModelSpec, vision: VisionSpec) -> None:
    """Raise ModelError if the decoder cannot take the rows of deep layers; its last layer computes few rows."""
    if len(vision.deep_layers) >= spec.n_layers:
        raise config.error("vision_config.deepstack_visual_indexes", f"expected less than {spec.n_layers} layers")
    if vision.deep_layers and spec.hidden_size % vision.square**2:
        raise config.error("vision_config.spatial_merge_size", f"expected its square to divide {spec.hidden_size}")


def _normalised(config: Config) -> None:
    """The chosen experts' weights have the sum 1 in this architecture, whether the file says so or not."""
    as_usual_rope(config)
    config.require("norm_topk_prob", True)
    config.override("norm_topk_prob", True)


QWEN2_5_VL = _family("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", {"qwen2_5_vl_text": qwen.QWEN2}, windowed=True)
QWEN3_VL = _family("Qwen3VLForConditionalGeneration", "qwen3_vl", {"qwen3_vl_text": qwen.QWEN3}, windowed=False)
QWEN3_VL_MOE = _family(
    "Qwen3VLMoeForConditionalGeneration",
    "qwen3_vl_moe",
    {"qwen3_vl_moe_text": qwen.QWEN3_MOE},
    _normalised,
    windowed=False,
)
