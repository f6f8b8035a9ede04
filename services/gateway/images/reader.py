"""The images of a conversation, as frames and tokens of its prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from msgspec.structs import replace
from ryzanstein.v1 import worker_pb2

from services.common.blockhash import image_digest
from services.gateway.api.chat import Part, Turn
from services.gateway.api.ignored import Ignored
from services.gateway.api.images import GivenImage
from services.gateway.api.parts import stand_in
from services.gateway.errors import invalid
from services.gateway.images.decoding import ImageLimits, decoded, from_base64, refused
from services.gateway.images.fetching import ImageFetcher
from services.gateway.images.gemma3 import GEMMA3
from services.gateway.images.idefics3 import IDEFICS3
from services.gateway.images.layout import ImageLayout, UnfitImageError
from services.gateway.images.qwen2_5_vl import QWEN2_5_VL
from services.gateway.text.codec import ServedModel

_LAYOUTS: Mapping[str, ImageLayout] = {"idefics3": IDEFICS3, "gemma3": GEMMA3, "qwen2_5_vl": QWEN2_5_VL}
_MIB = 1024 * 1024
MAX_FRAME_BYTES = 56 * _MIB  # limit of a request; a message to a worker has 64 MiB at the most
_AT_ONCE = 2  # decoding shares the cores with the event loop


@dataclass(frozen=True, slots=True)
class SeenImage:
    """An image that a model takes."""

    frames: bytes  # uint8 [n, height, width, 3]
    digest: bytes
    text: str  # stands in the prompt for the image
    rows: int  # tokens of its frames
    columns: int = 0  # tokens side by side in a frame of any sides


def layout_of(model: ServedModel) -> ImageLayout | None:
    """A model's layout of images; None: it reads text only, or its kind is newer than this gateway."""
    return _LAYOUTS.get(model.card.images.layout) if model.card.HasField("images") else None


class ImageReader:
    """Reads the images of requests."""

    def __init__(self, limits: ImageLimits, fetcher: ImageFetcher) -> None:
        self._limits, self._fetcher = limits, fetcher
        self._turn = asyncio.Semaphore(_AT_ONCE)

    async def read(self, turns: Sequence[Turn], model: ServedModel, layout: ImageLayout) -> list[SeenImage]:
        """The images of a conversation, in order; raises :class:`ApiError` (400) that names the client's field."""
        given = [part for turn in turns for part in turn.parts if isinstance(part, GivenImage)]
        if len(given) > self._limits.count:
            image = given[self._limits.count]
            message = f"`{image.field}`: a request may have at most {self._limits.count} images, got {len(given)}."
            raise invalid(message, image.field, "too_many_images")
        seen: list[SeenImage] = []
        for image in given:
            seen.append(await self._read(image, model.card.images, layout))
            if sum(len(one.frames) for one in seen) > MAX_FRAME_BYTES:
                message = (
                    f"`{image.field}`: the images of a request may take {MAX_FRAME_BYTES // _MIB} MiB as the model "
                    'takes them. Send fewer or smaller ones, or with `"detail": "low"`.'
                )
                raise invalid(message, image.field, "images_too_large")
        return seen

    async def _read(self, image: GivenImage, takes: worker_pb2.ImageInput, layout: ImageLayout) -> SeenImage:
        source, limits = image.source(), self._limits
        fetched = await self._fetcher.fetch(source.text, image.field, limits) if source.is_url else None

        def prepare() -> SeenImage:
            data = from_base64(source.text, image.field, limits) if fetched is None else fetched
            splits = takes.splits and not image.low_detail
            try:
                cut = layout.cut(decoded(data, image.field, limits), takes, splits=splits)
            except UnfitImageError as error:
                raise refused(image.field, str(error)) from error
            frames = b"".join(frame.tobytes() for frame in cut.frames)
            rows, columns = len(cut.frames) * takes.frame_tokens, 0
            if takes.cell:
                rows, columns = len(frames) // (3 * takes.cell**2), cut.frames[0].width // takes.cell
            return SeenImage(frames, image_digest(frames, columns), layout.text(cut, takes), rows, columns)

        async with self._turn:
            return await asyncio.to_thread(prepare)


def without_images(turns: Sequence[Turn], ignored: Ignored) -> Sequence[Turn]:
    """The turns for a model that reads text only; raises :class:`ApiError` (400) for an image that is no history.

    Notes stand in for the others, which `ignored` gets.
    """
    given = [part for turn in turns for part in turn.parts if isinstance(part, GivenImage)]
    if not given:
        return turns
    for image in given:
        if image.refusal is not None:
            raise image.refusal
    return [replace(turn, parts=[_noted(part, ignored) for part in turn.parts]) for turn in turns]


def _noted(part: Part, ignored: Ignored) -> Part:
    return stand_in(part.part, part.place, ignored) if isinstance(part, GivenImage) else part


def placed(ids: Sequence[int], seen: Sequence[SeenImage], token: int, param: str) -> list[worker_pb2.Image]:
    """The images at the rows that stand for them in a prompt, whose id is `token`; raises :class:`ApiError`."""
    rows = [at for at, one in enumerate(ids) if one == token]
    if len(rows) != (n_rows := sum(image.rows for image in seen)):
        message = f"The prompt of `{param}` has {len(rows)} tokens of images; its images have {n_rows}."
        raise invalid(message, param, "chat_template_error")
    images: list[worker_pb2.Image] = []
    done = 0
    for image in seen:
        first, last = rows[done], rows[done + image.rows - 1]
        done += image.rows
        images.append(
            worker_pb2.Image(
                first=first,
                tokens=last + 1 - first,
                digest=image.digest,
                frames=image.frames,
                columns=image.columns,
            )
        )
    return images
