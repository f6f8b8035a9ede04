"""The interface of the serializers of generated answers over HTTP."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from services.gateway.errors import ApiError
from services.gateway.generation.choice import Choice
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.generation.prepared import GeneratingBody, Prepared
from services.gateway.generation.request import Caller
from services.gateway.text.codec import ServedModel
from services.gateway.usage import Usage

Body = TypeVar("Body", bound=GeneratingBody)


class Serializer(ABC, Generic[Body]):
    """Prepares one request and writes its answer. Frames are one or several whole server-sent events."""

    @abstractmethod
    async def prepare(self, body: Body, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Preparer`. A fallback model begins the answer anew, before anything of it is sent."""

    @abstractmethod
    def opening(self, index: int, generation: Generation) -> bytes:
        """Frames before a choice's first chunk; may be empty."""

    @abstractmethod
    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """The frames of a chunk; empty when it has no token.

        In chat and completions, a token gets a frame even while its text is held back, so that clients see progress.
        """

    @abstractmethod
    async def ending(self, usage: Usage) -> bytes:
        """The last frames of a stream, including its end mark; raises :class:`ApiError`."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The last frames of a stream that fails."""

    @abstractmethod
    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed; raises :class:`ApiError`."""

    def new_choice(self) -> Choice:
        """A collector for one choice of an answer that is not streamed."""
        return Choice()

    def idle_event(self, generation: Generation) -> bytes:
        """An event that changes nothing, for a stream that is silent for long; empty where comments do."""
        return b""
