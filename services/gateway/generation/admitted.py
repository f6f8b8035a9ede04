"""A request from its admission to what it has used; the same for REST, gRPC and WebSocket."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from functools import partial
from typing import Any

from msgspec import Struct
from ryzanstein.v1 import routing_pb2

from services.common.durations import read_duration
from services.common.telemetry_names import AttributeValue
from services.gateway.api.ignored import Ignored
from services.gateway.api.options import MAX_SESSION_CHARS
from services.gateway.billing.account import Kind
from services.gateway.billing.meter import Meter
from services.gateway.errors import ApiError, invalid
from services.gateway.generation.abilities import require_generation
from services.gateway.generation.choice import Choice, merged
from services.gateway.generation.models import NEVER, Chain, ChainPlace, Models
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.generation.prepared import Body, GeneratingBody, Prepared, Preparer
from services.gateway.generation.request import Caller
from services.gateway.names.picking import Origin
from services.gateway.spans import describe
from services.gateway.tenants.tenant import Gate, Permit, Tenant
from services.gateway.text.codec import ServedModel
from services.gateway.upstream.patience import StartPatience
from services.gateway.usage import Usage

COST_HEADER = "x-ryzanstein-cost"  # in the currency of the prices
FALLBACK_HEADER = "x-ryzanstein-fallback-model"  # names the model that answers, where it is a fallback
TARGET_HEADER = "x-ryzanstein-target"  # names the model that answers, where the request names a route
_NOTHING = Usage()


def named_session(value: str) -> str:
    """The session of a header `x-session-id`; raises :class:`ApiError` (400)."""
    if len(value) > MAX_SESSION_CHARS:
        message = f"`x-session-id` may have at most {MAX_SESSION_CHARS} characters, got {len(value)}."
        raise invalid(message, "x-session-id")
    return value


class _Work(Struct, frozen=True):
    """The inputs of a generation."""

    preparer: Preparer[Any]
    body: GeneratingBody
    session: str
    traceparent: str


class AdmittedRequest:
    """Let in when its block begins, before anything is done that grows with its size; settled when the block ends.

    Entering the block raises :class:`ApiError` (429). A request that generates is started in it, and its chunks are
    taken there, or all of it. Until its first chunk it may start again, on the next model of its chain; an answer that
    is collected, until it is whole.
    """

    __slots__ = (
        "__weakref__", "_admitted_at", "_chain", "_counted", "_draw", "_gate", "_meter", "_outside", "_place",
        "_settled", "_time_limit_s", "_work", "admission", "answering", "ignored", "may_leave", "model", "models",
        "on_start", "patience", "prepared", "starting", "tenant", "used",
    )  # fmt: skip

    admission: Permit
    model: ServedModel  # that answers
    prepared: Prepared

    def __init__(
        self,
        gate: Gate,
        models: Models,
        meter: Meter,
        tenant: Tenant,
        ignored: Ignored,
        patience: StartPatience,
        time_limit_s: float = 0.0,
    ) -> None:
        """`time_limit_s`: how long it may take in all, from now on; 0: no limit."""
        self._gate = gate
        self._meter = meter
        self._counted: asyncio.Event | None = None  # set when the ledger has it
        self._admitted_at, self._time_limit_s = asyncio.get_running_loop().time(), time_limit_s
        self._work: _Work | None = None
        self._draw = str(random.getrandbits(64))
        self._chain: Chain | None = None  # models for the name in the body
        self._place: ChainPlace | None = None
        self._settled = False
        self._outside = ""  # the external model that answers
        self.may_leave = False  # whether external models may answer
        self.models = models
        self.patience = patience
        self.tenant = tenant
        self.ignored = ignored
        self.used = _NOTHING
        self.starting = True  # until it runs on its model
        self.answering = False  # from the first chunk on
        # Called whenever it has started on a model. A function that keeps the request makes a cycle, for the collector.
        self.on_start: Callable[[AdmittedRequest], None] = lambda request: None

    async def __aenter__(self) -> AdmittedRequest:
        self.admission = await self._gate.enter(self.tenant)
        return self

    async def __aexit__(self, *_failure: object) -> None:
        try:
            if self._work is not None:
                self.close()
                await self.count("completions", self.model)
        finally:
            self.patience.hear = lambda start: None  # a listener may refer to the request: a cycle, for the collector
            await self.settle()

    async def settle(self) -> None:
        """Give back its place and unused tokens, before its block ends if a client goes on to listen."""
        if not self._settled:
            self._settled = True
            await self.admission.settle(self.used)

    def tell(self, hear: Callable[[routing_pb2.ModelStart], None]) -> None:
        """Call `hear` while the request waits for a model that starts; it then waits as long as streams do."""
        self.patience.hear, self.patience.until = hear, self.patience.stream_until

    async def find_model(self, name: str | None, session: str = "") -> ServedModel:
        """The model for the name in a body; raises :class:`ApiError` when there is none that the tenant may use."""
        await self.models.look_up(name or "")
        self._chain = self._new_chain(name, session)
        self.model = await self.models.find(self._chain, self.tenant, self.patience)
        return self.model

    def answered_by(self) -> list[tuple[str, str]]:
        """Headers that name the model that answers, where the request names a route or a fallback answers."""
        names = [TARGET_HEADER] if self._chain is not None and self._chain.routed else []
        fell_back = self._outside or (self._place is not None and self._place.index)
        names += [FALLBACK_HEADER] if fell_back else []
        return [(name, self._outside or self.model.name) for name in names]

    def headers(self) -> list[tuple[bytes, bytes]]:
        """The headers of its answer: the rest of its tenant's limits, the model that answers, the cost once counted."""
        named = self.answered_by()
        if self.used.cost is not None:
            named.append((COST_HEADER, f"{self.used.cost:.9f}"))
        return [*self.admission.headers, *[(name.encode(), value.encode()) for name, value in named]]

    def caller(
        self,
        session: str,
        priority: int | None,
        traceparent: str,
        place: ChainPlace | None = None,
        keep_alive_s: float | None = None,
    ) -> Caller:
        """On whose behalf it runs, at a place of its chain; it gets no better priority than its tenant's own."""
        tenant = self.tenant
        effective = tenant.priority if priority is None else max(priority, tenant.priority)
        return Caller(
            tenant.name,
            effective,
            tenant.weight,
            session,
            traceparent,
            self.ignored,
            self._admitted_at,
            self._time_limit_s,
            self.models.handed_on(place) if place else NEVER,
            place.chain.wait_s if place else None,
            keep_alive_s,
            patience=self.patience,
        )

    async def start(self, preparer: Preparer[Body], body: Body, session: str = "", traceparent: str = "") -> None:
        """Prepare it on the first model of its chain that can answer; raises ApiError."""
        session = named_session(session) or body.session
        await self.models.look_up(body.model or "")
        self._chain = self._new_chain(body.model, session)
        place = await self.models.open(self._chain, self.tenant, self.patience)
        await self._start_on(place, _Work(preparer, body, session, traceparent))

    async def chunks(self) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        """Chunks of all sequences as they come, with the index of their sequence; raises :class:`ApiError`."""
        while True:
            generations = self.prepared.generations
            try:
                if len(generations) == 1:
                    chunk, generation = None, generations[0]
                    while chunk is None or chunk.finish is None:
                        chunk = await generation.next()
                        if chunk.finish is not None:
                            await self._count_generated()
                        self.answering = True
                        yield 0, chunk
                else:
                    async with aclosing(self._merged(generations)) as items:
                        async for item in items:
                            self.answering = True
                            yield item
            except ApiError as error:
                if self.answering:
                    raise
                await self._fall_back(error)
            else:
                return

    async def collect(self, new_choice: Callable[[], Choice] = Choice) -> Sequence[Choice]:
        """All choices, whole; raises :class:`ApiError`."""
        while True:
            try:
                return await self._collect(new_choice)
            except ApiError as error:
                await self._fall_back(error)

    async def count(self, kind: Kind, model: ServedModel) -> None:
        """Count what it used, once; returns when the count is safe. The end of its answer is sent after that."""
        await self._count(kind, model.name)

    async def _count(self, kind: Kind, model: str) -> None:
        if self._counted is None and self.used != _NOTHING:
            describe(self._described_use)
            self.used = self._meter.priced(model, self.used)
            self._counted = self._meter.count(kind, self.tenant, model, self.used)
        if self._counted is not None:
            await self._counted.wait()

    def hand_out(self, model: str) -> None:
        """Leave the answer to an external model."""
        self.close()
        self._work, self.used, self._outside = None, _NOTHING, model

    def begin_outside(self) -> None:
        """The external model begins to answer."""
        assert self._chain is not None
        self.models.count(self._chain, self._outside, fallback=True)

    async def count_outside(self, used: Usage) -> None:
        """Count what the external model used, as :meth:`count`."""
        self.used = used
        await self._count("completions", self._outside)

    def close(self) -> None:
        """Stop whatever still runs, and say what was used."""
        if self._work is not None:
            self.prepared.close()
            if self._counted is None:  # else it is final, and has its cost
                self.used = self.prepared.usage()

    async def _collect(self, new_choice: Callable[[], Choice]) -> Sequence[Choice]:
        generations = self.prepared.generations
        choices = [new_choice() for _ in generations]
        if len(choices) == 1:
            generation, choice = generations[0], choices[0]
            finished = False
            while not finished:
                chunk = await generation.next()
                choice.add(chunk)
                finished = chunk.finish is not None
        else:
            async with aclosing(merged(generations)) as chunks:
                async for index, chunk in chunks:
                    choices[index].add(chunk)
        await self._count_generated()
        return choices

    async def _merged(self, generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, OutputChunk], None]:
        """The chunks of several sequences; the last one comes when they are counted."""
        running = len(generations)
        async with aclosing(merged(generations)) as items:
            async for index, chunk in items:
                running -= chunk.finish is not None
                if not running:
                    await self._count_generated()
                yield index, chunk

    async def _count_generated(self) -> None:
        self.used = self.prepared.usage()
        await self.count("completions", self.model)

    def _described_start(self) -> dict[str, AttributeValue]:
        """The request as its span has it."""
        assert self._work is not None
        sequences, requested = self.prepared.generations, self._work.body.model or self.model.name
        return {
            "requested_model": requested,
            "choices": len(sequences),
            **sequences[0].request.options.described(),
        }

    def _described_use(self) -> dict[str, AttributeValue]:
        """The usage as its span has it."""
        described: dict[str, AttributeValue] = {
            "prompt_tokens": self.used.prompt_tokens,
            "completion_tokens": self.used.completion_tokens,
            "cached_tokens": self.used.cached_tokens,
        }
        if self._work is not None:
            finishes = (generation.finish or "abort" for generation in self.prepared.generations)
            # Of several sequences, each has named the span after itself.
            described |= {"generation_id": self.prepared.request_id, "finish_reasons": tuple(map(str, finishes))}
        return described

    def _new_chain(self, name: str | None, session: str) -> Chain:
        origin = Origin(self.tenant.name, session, self._draw)
        chain = self.models.chain(name or "", self.tenant, origin, outside=self.may_leave)
        if chain.patience_s is not None:
            self.patience.limit(chain.patience_s)
        return chain

    async def _fall_back(self, error: ApiError) -> None:
        """Start again on the next model of the chain; raises the error when none takes over."""
        self.close()
        assert self._work is not None
        assert self._place is not None
        place = await self.models.open(self._place.chain, self.tenant, self.patience, self._place, error)
        await self._start_on(place, self._work)

    async def _start_on(self, place: ChainPlace, work: _Work) -> None:
        """Prepare it at a place of its chain, or behind it."""
        self.starting = True
        while True:
            try:
                prepared = await self._prepare(place, work)
                break
            except ApiError as error:
                place = await self.models.open(place.chain, self.tenant, self.patience, place, error)
        await self.admission.reserve(prepared.reserved_tokens())
        self.models.count(place.chain, place.model.name, fallback=place.index > 0)
        self.model, self.prepared, self._work, self._place = place.model, prepared, work, place
        self.starting = False
        describe(self._described_start)
        if place.chain.mirror and not place.index:
            caller = self._caller_at(place, work)
            again = partial(copy(work.preparer).prepare, work.body)  # a copy, since a preparer may keep its request
            self.models.mirrors.begin(place.chain.name, place.chain.mirror, prepared, caller, again)
        self.on_start(self)

    async def _prepare(self, place: ChainPlace, work: _Work) -> Prepared:
        require_generation(place.model)
        return await work.preparer.prepare(work.body, place.model, self._caller_at(place, work))

    def _caller_at(self, place: ChainPlace, work: _Work) -> Caller:
        keep_alive_s = _keep_alive_s(work.body.keep_alive)
        return self.caller(work.session, work.body.priority, work.traceparent, place, keep_alive_s)


def _keep_alive_s(given: str | float | None) -> float | None:
    """Seconds of a body's `keep_alive`; raises :class:`ApiError` (400)."""
    if not isinstance(given, str):
        return given
    try:
        return read_duration(given)
    except ValueError as error:
        raise invalid(f"Invalid value for `keep_alive`: {error}.", "keep_alive", "invalid_value") from error
