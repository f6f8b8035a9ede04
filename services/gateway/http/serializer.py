"""How the endpoints over HTTP write answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.gateway.errors import ApiError
from services.gateway.generation.choice import Choice
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.generation.prepared import GeneratingBody, Prepared
from services.gateway.generation.request import Caller
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage


class Serializer(Protocol):
    """Writes the answer of one request. Frames are whole server-sent events, one or several."""

    def opening(self, index: int, generation: Generation) -> bytes:
        """Frames before a choice's first chunk; may be empty."""

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """The frames of a chunk; empty when it has no token.

        In chat and completions a token whose text is not certain yet has a frame, too: clients see the pace, and that
        their stream lives.
        """

    async def ending(self, usage: Usage) -> bytes:
        """The last frames of a stream, what marks its end included; raises :class:`ApiError`."""

    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that has begun and cannot go on."""

    def new_choice(self) -> Choice:
        """What collects a choice of an answer that is sent whole."""

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """The whole answer; raises :class:`ApiError`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The sequences of a body, and what writes them."""

    prepared: Prepared
    serializer: Serializer


class StreamableBody(GeneratingBody, Protocol):
    """A body whose answer may come as events."""

    @property
    def stream(self) -> bool | None:
        """Whether it does."""


Body = TypeVar("Body", bound=StreamableBody)


class GeneratingEndpoint(Protocol[Body]):
    """What differs between the routes that generate."""

    async def decode(self, data: bytes) -> Body:
        """Validate a body; raises :class:`ApiError`."""

    async def answer(self, body: Body, model: ServedModel, caller: Caller) -> Answer:
        """The sequences of a body and their serializer; raises :class:`ApiError`."""
