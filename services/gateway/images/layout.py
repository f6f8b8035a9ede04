"""The layout of an image for a kind of model: frames, and the text around their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image
from ryzanstein.v1 import worker_pb2

RESAMPLES = {one.name.lower(): one for one in Image.Resampling}


@dataclass(frozen=True, slots=True)
class Cut:
    """An image in frames: those of its parts by rows, then that of the whole."""

    frames: Sequence[Image.Image]
    rows: int  # 0: the whole alone
    columns: int


class UnfitImageError(Exception):
    """An image that the model does not take, with the reason."""


class _CutImage(Protocol):
    def __call__(self, image: Image.Image, takes: worker_pb2.ImageInput, *, splits: bool) -> Cut:
        """The frames of an RGB image; without `splits`, that of the whole alone. Raises UnfitImageError."""


class _TextOf(Protocol):
    def __call__(self, cut: Cut, takes: worker_pb2.ImageInput) -> str:
        """The text in place of a chat template's placeholder."""


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """One kind."""

    placeholder: str  # text of chat templates for an image
    cut: _CutImage
    text: _TextOf
