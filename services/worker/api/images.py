"""Checks the images of a request: a rank computes rows for every placeholder, and for nothing else."""

from __future__ import annotations

from hashlib import sha256

from ryzanstein.v1 import worker_pb2 as pb

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
        n_frames, rest = divmod(len(image.frames), 3 * takes.frame_size**2)
        if rest or not n_frames:
            message = f"{len(image.frames)} bytes are no frames of {takes.frame_size} x {takes.frame_size} pixels"
            raise InvalidRequestError(f"{field}.frames", message)
        n_rows = list(request.prompt_ids[image.first : end]).count(takes.token)
        if n_rows != n_frames * takes.frame_tokens:
            message = f"{n_rows} placeholders for {n_frames} frames of {takes.frame_tokens} rows"
            raise InvalidRequestError(f"{field}.tokens", message)
        if sha256(image.frames).digest() != image.digest:
            raise InvalidRequestError(f"{field}.digest", "not the SHA-256 of the frames")
