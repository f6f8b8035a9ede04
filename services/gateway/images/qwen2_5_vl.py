"""Qwen 2.5 VL: an image is one frame, whose sides are multiples of a cell and keep their ratio as far as they can.

The sizes are those of the model's training, as transformers' image processor has them.
"""

from __future__ import annotations

import math

from PIL import Image
from ryzanstein.v1 import worker_pb2

from services.gateway.images.layout import RESAMPLES, Cut, ImageLayout, UnfitImageError

_BEGIN, _ROW, _END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
_MOST_RATIO = 200


def _size(width: int, height: int, takes: worker_pb2.ImageInput) -> tuple[int, int]:
    """Width and height in pixels, within the fewest and the most that the model takes."""
    cell, least, most = takes.cell, takes.least_pixels, takes.most_pixels
    if max(width, height) > _MOST_RATIO * min(width, height):
        raise UnfitImageError(f"its longer side is more than {_MOST_RATIO} times the other.")
    sides = [round(side / cell) * cell for side in (width, height)]
    if math.prod(sides) > most:
        scale = math.sqrt(width * height / most)
        sides = [max(cell, math.floor(side / scale / cell) * cell) for side in (width, height)]
    elif math.prod(sides) < least:
        scale = math.sqrt(least / (width * height))
        sides = [math.ceil(side * scale / cell) * cell for side in (width, height)]
    if math.prod(sides) > takes.frame_tokens * cell**2:
        raise UnfitImageError("its sides are too different for the pixels that the model takes.")
    return sides[0], sides[1]


def _cut(image: Image.Image, takes: worker_pb2.ImageInput, *, splits: bool) -> Cut:
    return Cut([image.resize(_size(*image.size, takes), RESAMPLES[takes.resample])], 0, 0)


def _text(cut: Cut, takes: worker_pb2.ImageInput) -> str:
    (frame,) = cut.frames
    return f"{_BEGIN}{_ROW * (frame.width * frame.height // takes.cell**2)}{_END}"


QWEN2_5_VL = ImageLayout(f"{_BEGIN}{_ROW}{_END}", _cut, _text)
