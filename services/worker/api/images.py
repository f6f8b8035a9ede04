"""Checks the images of a request: a rank computes rows for every placeholder, and for nothing else."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import image_digest
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import EngineRequest


def check_images(request: EngineRequest, takes: pb.ImageInput | None) -> None:
    """Raise InvalidRequestError for images that the model does not take, or that do not fit the prompt."""
    if not request.images:
        return
    if takes is None:
        raise InvalidRequestError("images", "this worker reads text only")
    if request.embed:
        raise InvalidRequestError("images", "must be empty when embed is set")
    end = 0
    for number, image in enumerate(request.images):
        field = f"images[{number}]"
        if image.first < end or image.first + image.tokens > len(request.prompt_ids):
            message = f"tokens {image.first} to {image.first + image.tokens} overlap another image, or are not there"
            raise InvalidRequestError(f"{field}.first", message)
        end = image.first + image.tokens
        expected = _rows_with_sides(image, takes, field) if takes.cell else _rows_of_squares(image, takes, field)
        placeholders = [at for at in range(image.first, end) if request.prompt_ids[at] == takes.token]
        if len(placeholders) != expected:
            message = f"{len(placeholders)} placeholders for frames of {expected} rows"
            raise InvalidRequestError(f"{field}.tokens", message)
        if image.columns and placeholders[-1] - placeholders[0] >= expected:
            raise InvalidRequestError(f"{field}.tokens", "placeholders of a frame that do not follow each other")
        if image_digest(image.frames, image.columns) != image.digest:
            raise InvalidRequestError(f"{field}.digest", "not the SHA-256 of the frames")


def _rows_of_squares(image: pb.Image, takes: pb.ImageInput, field: str) -> int:
    """Rows of an image in square frames."""
    n_frames, rest = divmod(len(image.frames), 3 * takes.frame_size**2)
    if rest or not n_frames:
        message = f"{len(image.frames)} bytes are no frames of {takes.frame_size} x {takes.frame_size} pixels"
        raise InvalidRequestError(f"{field}.frames", message)
    if image.columns:
        raise InvalidRequestError(f"{field}.columns", "must be 0: frames have the size of the model's card")
    return n_frames * takes.frame_tokens


def _rows_with_sides(image: pb.Image, takes: pb.ImageInput, field: str) -> int:
    """Rows of an image that is one frame, whose sides are multiples of the card's cell."""
    n_rows, rest = divmod(len(image.frames), 3 * takes.cell**2)
    if rest or not 0 < n_rows <= takes.frame_tokens:
        message = (
            f"{len(image.frames)} bytes are no 1 to {takes.frame_tokens} cells of {takes.cell} x {takes.cell} pixels"
        )
        raise InvalidRequestError(f"{field}.frames", message)
    if not image.columns or n_rows % image.columns:
        raise InvalidRequestError(f"{field}.columns", f"{image.columns} columns for {n_rows} cells")
    return n_rows
