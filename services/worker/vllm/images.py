"""Images of vLLM's models: how gateways cut them, and how requests bring them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ryzanstein.v1 import worker_pb2 as pb

from services.compute.model.files import image_settings, pixel_bounds
from services.compute.model.loading.images import RESAMPLES
from services.compute.model.spec import ModelError
from services.worker.engine.request import EngineRequest

# By vLLM's names of models: the layout, and the filter that transformers takes for a file without one.
_LAYOUTS = {
    "Gemma3ForConditionalGeneration": ("gemma3", "bilinear"),
    "Qwen2_5_VLForConditionalGeneration": ("qwen2_5_vl", "bicubic"),
}
_BOUNDS = {"min_pixels", "max_pixels"}  # arguments of an image processor that gateways follow
_NO_SIZES = {"device"}  # arguments that change no size


@dataclass(frozen=True, slots=True)
class CoreImage:
    """An image of a prompt, of a size that vLLM's processor leaves as it is."""

    first: int  # position of its first token
    n_tokens: int  # all of them placeholders
    width: int  # pixels
    height: int
    pixels: bytes  # uint8 [height, width, 3]
    digest: str  # names it in vLLM's caches


def images_of(request: EngineRequest, takes: pb.ImageInput | None) -> tuple[CoreImage, ...]:
    """The images of a request, which were checked against `takes`."""
    images = []
    for image in request.images:
        assert takes is not None, "requests with images to a model of texts are refused"
        width = image.columns * takes.cell or takes.frame_size
        height = len(image.frames) // (3 * width)
        images.append(CoreImage(image.first, image.tokens, width, height, image.frames, image.digest.hex()))
    return tuple(images)


def images_taken(served: Any, folder: Path) -> pb.ImageInput | None:
    """The images that gateways may send, from vLLM's configuration of a model; None: texts alone.

    Raises ModelError for an image processor that gateways cannot follow.
    """
    known = [_LAYOUTS[name] for name in served.architectures if name in _LAYOUTS]
    multimodal, settings = served.multimodal_config, image_settings(folder)
    if not known or settings is None or multimodal is None or not multimodal.get_limit_per_prompt("image"):
        return None
    (layout, resample), (file, stored) = known[0], settings
    given = multimodal.mm_processor_kwargs or {}
    if unknown := sorted(given.keys() - _BOUNDS - _NO_SIZES):
        raise ModelError(f"mm_processor_kwargs: {unknown[0]}: gateways know {', '.join(sorted(_BOUNDS))} alone")
    values = {key: value for key, value in {**stored, **given}.items() if value is not None}
    for step, expected in (("do_resize", True), ("do_pan_and_scan", False)):
        if values.get(step, expected) is not expected:
            raise ModelError(f"{file}: {step}: gateways do not know {values[step]!r}; allowed: {expected}")
    number = values.get("resample", RESAMPLES.index(resample))
    if number not in range(len(RESAMPLES)):
        raise ModelError(f"{file}: resample: expected a number from 0 to {len(RESAMPLES) - 1}, found {number!r}")
    config = served.hf_config
    takes = pb.ImageInput(layout=layout, token=config.image_token_id, resample=RESAMPLES[number])
    if layout == "gemma3":
        takes.frame_size, takes.frame_tokens = _side(file, values), config.mm_tokens_per_image
    else:
        takes.cell = config.vision_config.patch_size * config.vision_config.spatial_merge_size
        takes.least_pixels, takes.most_pixels = pixel_bounds(file, values)
        takes.frame_tokens = takes.most_pixels // takes.cell**2
    return takes


def _side(file: Path, values: Mapping[str, Any]) -> int:
    """The side of a square frame. Raises ModelError."""
    size = values.get("size")
    side = size.get("height") if isinstance(size, dict) else None
    if not isinstance(side, int) or size != {"height": side, "width": side}:
        raise ModelError(f"{file}: size: expected an equal height and width, found {size!r}")
    return side
