"""Makes a decision: asks the coordinator and Redis, chooses a worker, books the request, binds the session."""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import routing_pb2, worker_pb2

from services.common.blockhash import HASH_BLOCK_TOKENS
from services.router.fleet import Fleet, UnavailableError
from services.router.held import HeldPrefixes
from services.router.membership import Member
from services.router.offloaded import offloaded_prefix
from services.router.policies.policy import Policy
from services.router.pool import Pool
from services.router.prefixes import Prefixes
from services.router.queue import QueueFullError, RouteQueue
from services.router.sessions import Binding, Held, Sessions, SessionsAway
from services.router.snapshot import (
    Decision,
    Floats,
    IneligibleReason,
    Query,
    Snapshot,
    hash64,
    why_not_for,
)
from services.router.starts import StartEstimate, Starts, serves

# Part of the caller's time-out that a request may wait. A caller without an answer would take this router for dead.
PATIENCE_USED = 0.9
# Two routers that bind one session agree after one or two attempts.
BIND_ATTEMPTS = 3


class OverloadedError(Exception):
    """No worker could take the request in time."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """A request in its pool, and the data of its decision. `choice` is None if no worker is eligible."""

    pool: Pool
    snapshot: Snapshot
    query: Query
    why_not: NDArray[np.uint8]
    choice: Decision | None


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """A booked decision."""

    evaluation: Evaluation
    choice: Decision
    member: Member
    binding: Binding  # the session's binding to the chosen worker
    seq: int
    queued_s: float = 0.0
    session: str | None = None  # result of binding the session; None without a session


@dataclass(frozen=True, slots=True)
class _Known:
    """The answers of the coordinators and of Redis about a request."""

    prefixes: Sequence[HeldPrefixes]  # answers of coordinators
    held: Held | None
    bindings_known: bool


@dataclass(slots=True)
class _Wait:
    """The limits of a request's wait, in seconds of the event loop's clock."""

    since: float  # perhaps at another router
    busy_until: float  # the end while workers serve the model, and are saturated
    cold_until: float  # the end for a request that has met the model without a serving worker
    cold: bool = False

    def until(self, pool: Pool) -> float:
        """The end of the wait, as the pool is now."""
        self.cold = self.cold or not serves(pool.snapshot())
        return self.cold_until if self.cold else self.busy_until


def _sequence() -> Iterator[int]:
    # Starts at the clock: a router that restarts under its old id continues above all acknowledged numbers.
    return itertools.count(time.time_ns() // 1000)


@dataclass(slots=True)
class Routing:
    """Makes the decisions of one router process."""

    fleet: Fleet
    policy: Policy
    sessions: Sessions
    prefixes: Sequence[Prefixes]  # a coordinator's each
    queue_size: int
    queue_timeout_s: float
    queues: dict[str, RouteQueue[Placement]] = field(default_factory=dict)
    starts: Starts = field(default_factory=Starts)
    _seqs: Iterator[int] = field(default_factory=_sequence)
    _modelless: int = 0  # requests that wait until their model is known
    _turn: int = field(default_factory=lambda: secrets.randbelow(1 << 20))  # random, or routers would run in step

    async def route(self, request: routing_pb2.RouteRequest) -> Placement:
        """Place a request and book it. Raises UnknownModelError, UnavailableError or OverloadedError."""
        wait = self._wait(request)
        pool = await self._pool(request.model, wait)
        known = await self._learn(request, touch=True)
        placed = await self._place_or_wait(pool, request, known, wait)
        if not (request.session and self.policy.uses_sessions):
            return placed
        if not known.bindings_known:
            return replace(placed, session="unknown")
        return await self._bind(request, placed, known.held)

    async def explain(self, request: routing_pb2.RouteRequest) -> Evaluation:
        """The decision as it would be now, without any effect."""
        pool = self.fleet.pool(request.model)
        return self._evaluate(pool, pool.snapshot(), request, await self._learn(request, touch=False))

    @property
    def anybody_waits(self) -> bool:
        """Whether any request is in a queue."""
        return any(self.queues.values())

    def forget(self, models: Sequence[str]) -> None:
        """Drop the queues and starts of models that no longer exist."""
        for model in models:
            self.queues.pop(model, None)
        self.starts.forget(models)

    def drain_queues(self) -> None:
        """Let waiting requests try again."""
        for queue in self.queues.values():
            queue.drain()

    def observe_starts(self) -> None:
        """Let the starts of models, and the requests that wait for them, take note of what their workers do now."""
        for model, pool in self.fleet.pools.items():
            queue = self.queues.get(model)
            if self.starts.observe(pool, wanted=bool(queue)) and queue:
                queue.expire()

    def wanted(self) -> list[Pool]:
        """The pools that requests wait for."""
        return [self.fleet.pools[model] for model, queue in self.queues.items() if queue]

    def starting(self) -> list[tuple[str, StartEstimate]]:
        """The models that requests wait for without a serving worker, and how far their starts are."""
        estimates = ((pool.model, self.starts.estimate(pool)) for pool in self.wanted())
        return [(model, estimate) for model, estimate in estimates if estimate is not None]

    def _wait(self, request: routing_pb2.RouteRequest) -> _Wait:
        """How long the request may wait: less than its caller does."""
        now, most_s = time.monotonic(), request.timeout_ms / 1000 * PATIENCE_USED or math.inf
        busy_s = min(self.queue_timeout_s, most_s)
        cold_s = min(request.patience_ms / 1000, most_s) if request.HasField("patience_ms") else busy_s
        return _Wait(now - request.waited_ms / 1000, now + busy_s, now + cold_s)

    async def _pool(self, model: str, wait: _Wait) -> Pool:
        """The request's pool. While this router does not know the models, wait for them."""
        while True:
            try:
                return self.fleet.pool(model)
            except UnavailableError:
                if self._modelless >= self.queue_size or time.monotonic() >= wait.cold_until:
                    raise
            wait.cold = True
            self._modelless += 1
            try:
                async with asyncio.timeout_at(wait.cold_until):
                    await self.fleet.wait_for_models()
            except TimeoutError:
                pass  # fleet.pool() raises the right error
            finally:
                self._modelless -= 1

    async def _learn(self, request: routing_pb2.RouteRequest, *, touch: bool) -> _Known:
        wants_session = bool(request.session) and self.policy.uses_sessions
        wants_prefixes = bool(request.block_hashes) and self.policy.uses_prefixes
        lookups = [each.look_up(request.block_hashes) for each in self.prefixes] if wants_prefixes else []
        held, known = await self._held(request, touch=touch) if wants_session else (None, True)
        answers = [await lookup for lookup in lookups]
        return _Known([answer for answer in answers if answer is not None], held, known)

    async def _held(self, request: routing_pb2.RouteRequest, *, touch: bool) -> tuple[Held | None, bool]:
        try:
            return await self.sessions.read(request.tenant, request.session, touch=touch), True
        except SessionsAway:
            return None, False

    async def _place_or_wait(
        self, pool: Pool, request: routing_pb2.RouteRequest, known: _Known, wait: _Wait
    ) -> Placement:
        queue = self.queues.get(pool.model)
        if queue is None:
            queue = self.queues[pool.model] = RouteQueue(self.queue_size)
        # A new request must not overtake waiting ones; an interrupted one has its turn already.
        if (not queue or request.attempt > 1) and (placed := self._book(pool, request, known)):
            return placed
        began = time.monotonic()
        try:
            placed = await queue.wait(
                request.tenant,
                request.priority,
                lambda: self._book(pool, request, known),
                lambda: wait.until(pool),
                wait.since,
            )
        except (QueueFullError, TimeoutError) as error:
            raise self._refusal(pool, queue_full=isinstance(error, QueueFullError)) from error
        return replace(placed, queued_s=time.monotonic() - began)

    def _refusal(self, pool: Pool, *, queue_full: bool) -> UnavailableError | OverloadedError:
        """Why a request cannot be placed: no worker serves the model, or all are saturated."""
        snapshot = pool.snapshot()
        if serves(snapshot):
            reason = "the queue for a worker is full" if queue_full else "no worker became free in time"
            return OverloadedError(reason, _retry_after_s(pool, snapshot))
        verdicts = Counter(snapshot.why_not.tolist())
        reasons = [f"{n} {IneligibleReason(why).text}" for why, n in verdicts.most_common()]
        reasons += sorted({member.wake_refusal for member in pool.members.values() if member.wake_refusal})
        reasons += ["the queue is full"] if queue_full else []
        message = f"no worker serves {pool.model} now" + (f" ({', '.join(reasons)})" if reasons else "")
        estimate = self.starts.estimate(pool)
        return UnavailableError(message, math.ceil(estimate.seconds or 0) if estimate else 0)

    def _evaluate(self, pool: Pool, snapshot: Snapshot, request: routing_pb2.RouteRequest, known: _Known) -> Evaluation:
        depths, offloaded = HeldPrefixes.joined(known.prefixes, pool), None
        if depths is not None and any(answer.roster.below_devices for answer in known.prefixes):
            offloaded = offloaded_prefix(pool.members, depths, snapshot.speeds.token_ms)
        query = Query(
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            request_key=hash64(f"{request.request_id}/{request.attempt}"),
            session_key=hash64(f"{request.tenant}\0{request.session}") if request.session else 0,
            bound=_index_of(pool, known.held.binding if known.held else None),
            bindings_known=known.bindings_known,
            matched_tokens=_matched_tokens(depths),
            offloaded=offloaded,
            adapter=pool.adapters.loads(request.adapter) if request.adapter else None,
            excluded=tuple(pool.members[w].index for w in request.excluded_workers if w in pool.members),
            turn=self._turn,
        )
        why_not = why_not_for(snapshot, query)
        if request.attempt > 1 and why_not.all():  # an accepted request rather waits at a saturated worker than fails
            why_not = np.where(why_not == IneligibleReason.SATURATED, np.uint8(0), why_not)
        return Evaluation(pool, snapshot, query, why_not, self.policy.choose(snapshot, query, why_not))

    def _book(self, pool: Pool, request: routing_pb2.RouteRequest, known: _Known) -> Placement | None:
        snapshot = pool.snapshot()
        evaluation = self._keep(pool, snapshot, request, known) or self._evaluate(pool, snapshot, request, known)
        return self._book_at(evaluation, evaluation.choice) if evaluation.choice else None

    def _keep(
        self, pool: Pool, snapshot: Snapshot, request: routing_pb2.RouteRequest, known: _Known
    ) -> Evaluation | None:
        """The evaluation of a session that obviously stays at its worker, at a fraction of the work; None: unknown."""
        bound = _index_of(pool, known.held.binding if known.held else None)
        if bound < 0 or request.excluded_workers or request.adapter:
            return None
        member = pool.members[snapshot.worker_ids[bound]]
        if (blocks := HeldPrefixes.deepest_at(known.prefixes, member)) is None:
            return None
        # A standby is chosen by what all workers hold.
        standby = 0 < member.state.standby_tokens <= request.prompt_tokens + request.max_tokens
        depths = HeldPrefixes.joined(known.prefixes, pool) if standby else None
        query = Query(
            prompt_tokens=request.prompt_tokens,
            max_tokens=request.max_tokens,
            session_key=hash64(f"{request.tenant}\0{request.session}"),
            bound=bound,
            matched_tokens=_matched_tokens(depths),
        )
        choice = self.policy.keep(snapshot, query, float(blocks * HASH_BLOCK_TOKENS) if known.prefixes else None)
        return Evaluation(pool, snapshot, query, snapshot.why_not, choice) if choice else None

    def _book_at(self, evaluation: Evaluation, choice: Decision) -> Placement:
        pool, query = evaluation.pool, evaluation.query
        member = pool.members[evaluation.snapshot.worker_ids[choice.index]]
        tokens = query.prompt_tokens - int(choice.chosen.matched_tokens)
        seq = next(self._seqs)
        self._turn += 1
        pool.book(member.worker_id, seq, max(tokens, 0), query.adapter.digest if query.adapter else "")
        return Placement(evaluation, choice, member, Binding(member.worker_id, member.incarnation), seq)

    async def _bind(self, request: routing_pb2.RouteRequest, placed: Placement, held: Held | None) -> Placement:
        """Bind the session to the chosen worker, or follow the binding that another router wrote first."""
        result = "moved" if held and held.binding else "new"
        for attempt in range(BIND_ATTEMPTS):
            old = held.binding if held else None
            if old is not None and _same(old, placed.binding):
                return replace(placed, session=result if attempt else "kept")
            wanted = replace(placed.binding, version=old.version + 1 if old else 1)
            try:
                held = await self.sessions.bind(request.tenant, request.session, held, wanted)
            except SessionsAway:
                return replace(placed, session="unknown")
            first = held.binding
            if first is not None and not _same(first, wanted) and (moved := self._follow_binding(placed, first)):
                return replace(moved, session="followed")
        return replace(placed, session=result)

    def _follow_binding(self, placed: Placement, binding: Binding) -> Placement | None:
        """Place the request at the worker that another router has bound; None if that worker is not eligible."""
        evaluation = placed.evaluation
        pool = evaluation.pool
        index = _index_of(pool, binding)
        if index < 0:
            return None
        snapshot = pool.snapshot()
        if snapshot.worker_ids != evaluation.snapshot.worker_ids or why_not_for(snapshot, evaluation.query)[index]:
            return None
        pool.unbook(placed.binding.worker_id, placed.seq)
        estimates, costs = self.policy.weigh(evaluation.snapshot, evaluation.query)
        choice = Decision(index, "session bound by another router", estimates.at(index, costs))
        return self._book_at(evaluation, choice)


def _matched_tokens(depths: Floats | None) -> Floats | None:
    """Prefix tokens on the workers' devices, [n_workers], of depths in blocks."""
    return None if depths is None else depths[worker_pb2.KV_PLACE_DEVICE] * HASH_BLOCK_TOKENS


def _same(one: Binding, other: Binding) -> bool:
    return (one.worker_id, one.incarnation) == (other.worker_id, other.incarnation)


def _index_of(pool: Pool, binding: Binding | None) -> int:
    """The bound worker's index in the pool's snapshots; -1 if it has left or restarted."""
    member = pool.members.get(binding.worker_id) if binding else None
    if member is None or binding is None or member.incarnation != binding.incarnation:
        return -1
    return member.index


def _retry_after_s(pool: Pool, snapshot: Snapshot) -> int:
    """Seconds until the first worker is no longer saturated; at least 1."""
    backlog = float((snapshot.queued_tokens / snapshot.speeds.prefill_rate).min()) - pool.saturation_s
    return max(1, math.ceil(backlog))
