"""The interface of the serializers of generated answers over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from services.gateway.api.ignored import Ignored
from services.gateway.errors import ApiError
from services.gateway.generation.choice import Choice
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.generation.prepared import GeneratingBody, Prepared
from services.gateway.generation.request import Caller
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage


class Serializer(Protocol):
    """Writes the answer to one request. Frames are one or several whole server-sent events."""

    def opening(self, index: int, generation: Generation) -> bytes:
        """Frames before a choice's first chunk; may be empty."""

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """The frames of a chunk; empty when it has no token.

        In chat and completions, a token gets a frame even while its text is held back, so that clients see progress.
        """

    async def ending(self, usage: Usage) -> bytes:
        """The last frames of a stream, including its end mark; raises :class:`ApiError`."""

    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that fails."""

    def new_choice(self) -> Choice:
        """A collector for one choice of an answer that is not streamed."""

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed; raises :class:`ApiError`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The sequences of a request, and their serializer."""

    prepared: Prepared
    serializer: Serializer
    # Returns an event that changes nothing, for a stream that is silent for long; None where comments do.
    idle_event: Callable[[Generation], bytes] | None = None


class StreamableBody(GeneratingBody, Protocol):
    """A body whose answer may be streamed."""

    @property
    def stream(self) -> bool | None:
        """Whether the client asks for a stream."""


Body = TypeVar("Body", bound=StreamableBody)


class GeneratingEndpoint(Protocol[Body]):
    """The part in which generating routes differ."""

    async def decode(self, data: bytes, ignored: Ignored) -> Body:
        """Validate a body without what `ignored` collects; raises :class:`ApiError`."""

    async def answer(self, body: Body, model: ServedModel, caller: Caller) -> Answer:
        """The sequences of a body and their serializer; raises :class:`ApiError`."""
