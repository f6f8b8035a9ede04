"""Idefics 3 and SmolVLM: an image is resized, cut into square frames, and shown whole in one more.

The order and the sizes are those of the models' training, as transformers' image processors have them.
"""

from __future__ import annotations

import math

from PIL import Image
from ryzanstein.v1 import worker_pb2

from services.gateway.images.layout import RESAMPLES, Cut, ImageLayout

_AROUND, _WHOLE, _ROW = "<fake_token_around_image>", "<global-img>", "<image>"


def _scaled(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size whose longer side is `longest`; the other side is even if it was computed odd."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _in_frames(width: int, height: int, side: int) -> tuple[int, int]:
    """The size in whole frames, the longer side first, the other from the ratio of the sides."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / side) * side
        height = math.ceil(int(width / ratio) / side) * side
    else:
        height = math.ceil(height / side) * side
        width = math.ceil(int(height * ratio) / side) * side
    return width, height


def _cut(image: Image.Image, takes: worker_pb2.ImageInput, *, splits: bool) -> Cut:
    side, resample = takes.frame_size, RESAMPLES[takes.resample]
    image = image.resize(_scaled(*image.size, takes.longest_edge), resample)
    if not splits:
        return Cut([image.resize((side, side), resample)], 0, 0)
    image = image.resize(_in_frames(*image.size, side), resample)
    columns, rows = image.width // side, image.height // side
    if rows == columns == 1:
        return Cut([image], 0, 0)
    corners = [(column * side, row * side) for row in range(rows) for column in range(columns)]
    frames = [image.crop((left, top, left + side, top + side)) for left, top in corners]
    return Cut([*frames, image.resize((side, side), resample)], rows, columns)


def _text(cut: Cut, takes: worker_pb2.ImageInput) -> str:
    frame = _ROW * takes.frame_tokens
    lines = [
        "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{frame}" for column in range(cut.columns)) + "\n"
        for row in range(cut.rows)
    ]
    return "".join(lines) + ("\n" if lines else "") + f"{_AROUND}{_WHOLE}{frame}{_AROUND}"


IDEFICS3 = ImageLayout(_ROW, _cut, _text)
