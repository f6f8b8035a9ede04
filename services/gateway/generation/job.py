"""A request to generate, from its body to what it has used; the same for REST, gRPC and WebSocket."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Generic, Protocol, TypeVar

from services.gateway.errors import ApiError
from services.gateway.generation.entrance import AdmittedRequest, named_session
from services.gateway.generation.output import OutputChunk
from services.gateway.generation.request import Caller
from services.gateway.generation.sequences import Choice, Sequences, merged
from services.gateway.text.codec import ServedModel

FALLBACK_HEADER = "x-ryzanstein-fallback-model"  # names the model that answers, where it is not the one asked for


class GeneratingBody(Protocol):
    """What every generating endpoint's body says."""

    @property
    def model(self) -> str | None:
        """The model asked for."""

    @property
    def stream(self) -> bool | None:
        """Whether the answer comes as events."""

    @property
    def priority(self) -> int | None:
        """The priority asked for."""

    @property
    def session(self) -> str:
        """What keeps requests on one worker; empty when the body names nothing."""


Body = TypeVar("Body", bound=GeneratingBody)


class Preparer(Protocol[Body]):
    """What differs between the endpoints."""

    async def decode(self, data: bytes) -> Body:
        """Validate a body; raises :class:`ApiError`."""

    async def prepare(self, body: Body, model: ServedModel, caller: Caller) -> Sequences:
        """Make sequences of it; raises :class:`ApiError`."""


class GenerationTask(Generic[Body]):
    """A request that was let in: :meth:`start` it, then take its chunks or all of it; :meth:`close` in any case.

    Until its first chunk it may start again, on the fallback model; an answer that is collected, until it is whole.
    """

    model: ServedModel  # the one that answers
    sequences: Sequences

    def __init__(
        self, request: AdmittedRequest, preparer: Preparer[Body], body: Body, session: str = "", traceparent: str = ""
    ) -> None:
        self.request = request
        self.body = body
        self.answering = False  # from the first chunk on
        # Called whenever it has started on a model. Who keeps the task in it makes a cycle, left to the collector.
        self.on_start: Callable[[GenerationTask[Body]], None] = lambda task: None
        self._preparer = preparer
        self._session = session
        self._traceparent = traceparent
        self._asked = ""
        self._started = False

    @property
    def fell_back(self) -> bool:
        """Whether another model answers than the one asked for."""
        return self.model.name != self._asked

    async def start(self) -> None:
        """Prepare it on the model asked for, or on the fallback model if that has no worker; raises ApiError."""
        named_session(self._session)
        request = self.request
        self._asked, model = await request.models.choose(self.body.model or "", request.tenant)
        await self._start_on(model)

    async def chunks(self) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        """Chunks of all sequences as they come, with the index of their sequence; raises :class:`ApiError`."""
        while True:
            generations = self.sequences.generations
            try:
                if len(generations) == 1:
                    chunk, generation = None, generations[0]
                    while chunk is None or chunk.finish is None:
                        chunk = await generation.next()
                        self.answering = True
                        yield 0, chunk
                else:
                    async with aclosing(merged(generations)) as items:
                        async for item in items:
                            self.answering = True
                            yield item
            except ApiError as error:
                if self.answering:
                    raise
                await self._fall_back(error)
            else:
                return

    async def collect(self) -> list[Choice]:
        """All choices, whole; raises :class:`ApiError`."""
        try:
            return await self.sequences.collect()
        except ApiError as error:
            await self._fall_back(error)
            return await self.sequences.collect()

    def close(self) -> None:
        """Stop whatever still runs, and say what was used."""
        if self._started:
            self.sequences.close()
            self.request.used = self.sequences.usage()

    async def _fall_back(self, error: ApiError) -> None:
        """Start again on the fallback model; raises the error when that would not help."""
        self.close()
        await self._start_on(self.request.models.after(self.model, error, self.request.tenant))

    async def _start_on(self, model: ServedModel) -> None:
        body, request = self.body, self.request
        caller = request.caller(self._session or body.session, body.priority, self._traceparent)
        sequences = await self._preparer.prepare(body, model, caller)
        if model.name != self._asked:
            request.models.count_fallback(self._asked)
        await request.admission.reserve(sequences.reserved_tokens())
        self.model, self.sequences, self._started = model, sequences, True
        self.on_start(self)
