"""From an image's bytes to its pixels, within limits."""

from __future__ import annotations

import base64
import binascii
import io
import struct
import warnings
from dataclasses import dataclass

from PIL import ExifTags, Image, UnidentifiedImageError

from services.gateway.errors import ApiError, invalid

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_MIB = 1024 * 1024
# Pillow's errors for broken files.
_BROKEN = (
    *(OSError, SyntaxError, ValueError, EOFError, MemoryError),
    *(TypeError, LookupError, ArithmeticError, struct.error),
)
# By the orientation of a photograph in its EXIF data.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits of one request's images."""

    count: int
    n_bytes: int  # bytes of an encoded image
    pixels: int  # pixels of a decoded image


def refused(field: str, reason: str) -> ApiError:
    """400: an image that cannot be read."""
    return invalid(f"`{field}` cannot be read as an image: {reason}", field, "invalid_image")


def from_base64(text: str, field: str, limits: ImageLimits) -> bytes:
    """The bytes of an image in base64; raises :class:`ApiError` (400)."""
    if len(text) > (limits.n_bytes + 2) // 3 * 4 + 4:
        raise too_many_bytes(field, limits)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise refused(field, "its data are no base64.") from error


def too_many_bytes(field: str, limits: ImageLimits) -> ApiError:
    """400: an encoded image is too large."""
    return refused(field, f"it has more than {limits.n_bytes} bytes ({limits.n_bytes // _MIB} MiB).")


def decoded(data: bytes, field: str, limits: ImageLimits) -> Image.Image:
    """The image in RGB, upright; the first picture of an animation. Raises :class:`ApiError` (400).

    Its size is known, and checked, before a pixel is decoded.
    """
    if len(data) > limits.n_bytes:
        raise too_many_bytes(field, limits)
    try:
        with warnings.catch_warnings(), Image.open(io.BytesIO(data), formats=FORMATS) as image:
            warnings.filterwarnings("ignore", module="PIL")  # the limit of pixels is our own
            if image.width * image.height > limits.pixels:
                size = f"{image.width} x {image.height}"
                raise refused(field, f"it has {size} pixels; at most {limits.pixels} are allowed.")
            turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
            upright = image if turn is None else image.transpose(turn)
            if upright.mode.startswith("I"):  # 16 bits of grey
                return upright.convert("I").point(lambda grey: grey * (1 / 256)).convert("L").convert("RGB")
            return upright.convert("RGB")
    except UnidentifiedImageError as error:
        raise refused(field, f"its format is none of {', '.join(FORMATS)}.") from error
    except Image.DecompressionBombError as error:
        raise refused(field, f"it has too many pixels; at most {limits.pixels} are allowed.") from error
    except _BROKEN as error:
        raise refused(field, "it is broken or cut off.") from error
