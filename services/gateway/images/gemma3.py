"""Gemma 3: an image becomes one square frame, whatever the ratio of its sides."""

from __future__ import annotations

from PIL import Image
from ryzanstein.v1 import worker_pb2

from services.gateway.images.layout import RESAMPLES, Cut, ImageLayout

_BEGIN, _ROW, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


def _cut(image: Image.Image, takes: worker_pb2.ImageInput, *, splits: bool) -> Cut:
    return Cut([image.resize((takes.frame_size, takes.frame_size), RESAMPLES[takes.resample])], 0, 0)


def _text(cut: Cut, takes: worker_pb2.ImageInput) -> str:
    return f"\n\n{_BEGIN}{_ROW * takes.frame_tokens}{_END}\n\n"


GEMMA3 = ImageLayout(_BEGIN, _cut, _text)
