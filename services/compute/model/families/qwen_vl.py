"""Qwen 2.5 VL: Qwen 2, with a tower whose patches attend within windows, and images of any size."""

from __future__ import annotations

from dataclasses import replace

from services.compute.model.families import qwen
from services.compute.model.families.config import MAX_LAYERS, Config
from services.compute.model.families.llama import ACTIVATIONS
from services.compute.model.families.multimodal import as_usual_rope, multimodal_family
from services.compute.model.families.naming import TEXT_PREFIXES
from services.compute.model.files import image_settings, pixel_bounds
from services.compute.model.spec import ModelError, ModelSpec, VisionSpec

_NORM_EPS = 1e-6
_PREFIXES = (("model.visual.", "visual."), *TEXT_PREFIXES)
# Settings of videos and of training, and what the projection says as well.
_UNUSED = ("tokens_per_second", "spatial_patch_size", "rope_parameters", "out_hidden_size")
_MOST_PATCHES = 1 << 16


def _vision(config: Config) -> VisionSpec | None:
    """Read the tower; None for a folder that does not say how images are prepared. Raises ModelError."""
    settings = image_settings(config.file.parent)
    if config.raw("vision_config") is None or settings is None:
        return None
    tower = config.section("vision_config")
    tower.pass_over(*_UNUSED)
    for key, allowed in (("in_channels", 3), ("in_chans", 3), ("temporal_patch_size", 2)):
        tower.require(key, allowed)
    hidden, heads = tower.integer("hidden_size", 3584), tower.integer("num_heads", 16)
    if hidden % (4 * heads):
        raise tower.error("num_heads", f"expected a divisor of hidden_size {hidden} whose quotient divides by 4")
    patch, square = tower.integer("patch_size", 14), tower.integer("spatial_merge_size", 2)
    most = pixel_bounds(*settings)[1] // patch**2
    if not square**2 <= most <= _MOST_PATCHES:
        raise ModelError(f"{settings[0]}: max_pixels: expected {square**2} to {_MOST_PATCHES} patches, found {most}")
    return VisionSpec(
        layout="qwen2_5_vl",
        image_token=config.integer("image_token_id", 151_655),
        frame_size=0,
        patch_size=patch,
        square=square,
        hidden_size=hidden,
        ffn_size=tower.integer("intermediate_size", 3420),
        n_heads=heads,
        n_layers=tower.integer("depth", 32, at_most=MAX_LAYERS),
        activation=tower.choice("hidden_act", ACTIVATIONS, "silu"),
        norm_eps=_NORM_EPS,
        tower="visual.",
        projection="visual.merger.mlp.2",
        most_patches=most,
        window=max(1, tower.integer("window_size", 112) // patch // square),
        full_layers=_full_layers(tower),
    )


def _full_layers(tower: Config) -> tuple[int, ...]:
    """Return the layers of a tower without windows. Raises ModelError."""
    layers = tower.raw("fullatt_block_indexes")
    layers = [7, 15, 23, 31] if layers is None else layers
    if not isinstance(layers, list) or not all(isinstance(one, int) for one in layers):
        raise tower.error("fullatt_block_indexes", f"expected a list of numbers of layers, found {layers!r}")
    return tuple(layers)


def _sections(config: Config) -> tuple[int, ...]:
    """Return the pairs that turn by time, line and column. Raises ModelError."""
    text = config.raw("text_config")
    values = text if isinstance(text, dict) else config.values
    ropes = [values[key] for key in ("rope_parameters", "rope_scaling") if isinstance(values.get(key), dict)]
    sections = next((rope["mrope_section"] for rope in ropes if "mrope_section" in rope), [16, 24, 24])
    if not isinstance(sections, list) or len(sections) != 3 or not all(isinstance(one, int) for one in sections):
        raise config.error("mrope_section", f"expected three numbers of pairs, found {sections!r}")
    return tuple(sections)


_FAMILY = multimodal_family(
    "Qwen2_5_VLForConditionalGeneration",
    "qwen2_5_vl",
    {"qwen2_5_vl_text": qwen.QWEN2},
    as_usual_rope,
    _vision,
    _PREFIXES,
)


def _read_spec(config: Config) -> ModelSpec:
    """Read the decoder, whose ropes turn by places in images if there is a tower. Raises ModelError."""
    sections, spec = _sections(config), _FAMILY.read_spec(config)
    if spec.vision is None:
        return spec
    layers = []
    for layer in spec.layers:
        if layer.rope is None or sum(sections) != layer.rope.rotary_dim // 2:
            raise config.error("mrope_section", f"expected pairs of a whole head in sum, found {list(sections)}")
        layers.append(replace(layer, rope=replace(layer.rope, sections=sections)))
    return replace(spec, layers=tuple(layers))


QWEN2_5_VL = replace(_FAMILY, read_spec=_read_spec)
