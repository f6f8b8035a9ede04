"""Reads how a model's publisher prepares images. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.compute.model.files import IMAGE_FILES, image_settings, pixel_bounds
from services.compute.model.spec import ModelError
from services.compute.model.vision import VisionSpec

RESAMPLES = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by their numbers in the files
_LONGEST = 4096  # pixels of the longer side; transformers prepares no larger image
_STEPS = ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb")
_TOLERANCE = 1e-6
# Defaults of transformers for values that the file does not have.
_RESAMPLED = {"gemma3": "bilinear", "idefics3": "lanczos", "qwen2_5_vl": "bicubic"}
_HALF = (0.5, 0.5, 0.5)
_CLIP_MEAN, _CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@dataclass(frozen=True, slots=True)
class ImageProcessing:
    """From an image to frames, and to numbers for the tower."""

    longest_edge: int  # longer side of an image before it is cut, pixels; 0: it is made a frame
    splits: bool  # an image larger than a frame is cut into several, and one of the whole image
    resample: str  # filter of the resizing, of RESAMPLES
    mean: tuple[float, ...]  # [3], of pixels from 0 to 1
    std: tuple[float, ...]  # [3]
    least_pixels: int = 0  # bounds of a frame with any sides
    most_pixels: int = 0


def read_image_processing(folder: Path, vision: VisionSpec) -> ImageProcessing:
    """Read a folder's image processor, for the frames of `vision`. Raises ModelError naming the file and the key."""
    settings = image_settings(folder)
    if settings is None:
        raise ModelError(f"{folder}: {IMAGE_FILES[0][0]}: missing; it says how images are prepared for this model")
    file, given = settings
    values = {key: value for key, value in given.items() if value is not None}
    for step in _STEPS:
        if values.get(step, True) is not True:
            raise ModelError(f"{file}: {step}: {values[step]!r} is not implemented; allowed: true")
    if abs(255 * _number(file, values, "rescale_factor", 1 / 255) - 1) > _TOLERANCE:
        raise ModelError(f"{file}: rescale_factor: {values['rescale_factor']!r} is not implemented; allowed: 1/255")
    resample = values.get("resample", RESAMPLES.index(_RESAMPLED[vision.layout]))
    if not isinstance(resample, int) or not 0 <= resample < len(RESAMPLES):
        raise ModelError(f"{file}: resample: expected a number from 0 to {len(RESAMPLES) - 1}, found {resample!r}")
    any_sides = vision.layout == "qwen2_5_vl"
    if any_sides:
        _check_patches(file, values, vision)
    least, most = pixel_bounds(file, values) if any_sides else (0, 0)
    return ImageProcessing(
        longest_edge={"gemma3": _whole, "idefics3": _cut, "qwen2_5_vl": lambda *_: 0}[vision.layout](
            file, values, vision.frame_size
        ),
        splits=vision.layout == "idefics3" and values.get("do_image_splitting", True) is True,
        resample=RESAMPLES[resample],
        mean=_channels(file, values, "image_mean", _CLIP_MEAN if any_sides else _HALF),
        std=_channels(file, values, "image_std", _CLIP_STD if any_sides else _HALF),
        least_pixels=least,
        most_pixels=most,
    )


def _check_patches(file: Path, values: Mapping[str, Any], vision: VisionSpec) -> None:
    """Raise ModelError if the image processor's patches are not the tower's."""
    expected = {"patch_size": vision.patch_size, "merge_size": vision.square, "temporal_patch_size": 2}
    for key, size in expected.items():
        if values.get(key, size) != size:
            raise ModelError(f"{file}: {key}: expected {size}, as in config.json, found {values[key]!r}")


def _cut(file: Path, values: Mapping[str, Any], frame_size: int) -> int:
    """Return the longer side of an image before it is cut into frames."""
    if (largest := _edge(file, values, "max_image_size")) != frame_size:
        raise ModelError(f"{file}: max_image_size: {largest} pixels, but image_size of config.json is {frame_size}")
    longest = _edge(file, values, "size")
    if longest > _LONGEST:
        raise ModelError(f"{file}: size: expected {_LONGEST} pixels at most, found {longest}")
    return longest


def _whole(file: Path, values: Mapping[str, Any], frame_size: int) -> int:
    """Check the size of an image that is made one frame, whatever the ratio of its sides; return 0."""
    if values.get("do_pan_and_scan", False) is not False:
        raise ModelError(f"{file}: do_pan_and_scan: {values['do_pan_and_scan']!r} is not implemented; allowed: false")
    size = values.get("size")
    if size != {"height": frame_size, "width": frame_size}:
        raise ModelError(f"{file}: size: expected height and width {frame_size}, as in config.json, found {size!r}")
    return 0


def _edge(file: Path, values: Mapping[str, Any], key: str) -> int:
    size = values.get(key)
    edge = size.get("longest_edge") if isinstance(size, dict) else None
    if not isinstance(edge, int) or isinstance(edge, bool) or edge < 1:
        raise ModelError(f"{file}: {key}: expected an object with longest_edge, a number of pixels, found {size!r}")
    return edge


def _channels(file: Path, values: Mapping[str, Any], key: str, default: Sequence[float]) -> tuple[float, ...]:
    given = values.get(key, list(default))
    if not isinstance(given, list) or len(given) != 3 or not all(isinstance(one, int | float) for one in given):
        raise ModelError(f"{file}: {key}: expected three numbers, found {given!r}")
    if key == "image_std" and min(given) <= 0:
        raise ModelError(f"{file}: {key}: expected numbers above 0, found {given!r}")
    return tuple(float(one) for one in given)


def _number(file: Path, values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key, default)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ModelError(f"{file}: {key}: expected a number, found {value!r}")
    return float(value)
