"""The workers that serve one model, as this router knows them now."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import worker_pb2

from services.router.breaker import Breaker, BreakerLimits, BreakerState, ejected
from services.router.snapshot import Floats, Snapshot, Speeds, WhyNot, hash64
from services.router.speeds import StepGrowth, Told, speeds_of

# A dispatch the worker has not acknowledged for this long was never submitted: its gateway died or gave up.
UNACKNOWLEDGED_S = 2.0
# One that has missed two moments at which it had to speak is stopped or cut off; by default that is every two seconds.
SILENT_BEATS, SILENT_S = 2.5, 5.0
# Over what time shares of work are compared: long against a request, short against a shift of load.
WORK_HALF_LIFE_S = 20.0
# Below this many requests per worker a step is hardly slower than for one, and unequal shares harm nobody.
BUSY_LOAD = 4.0
# A rate follows the prompts that a worker has just had; what kind of worker it is shows over this time.
TOKEN_HALF_LIFE_S = 10.0
# For this long after its first request what a worker tells of itself is mostly what it had found in a probe.
PROBED_S = 0.5
# For this long speeds that were derived from the workers' words serve all decisions: they change slowly.
SPEEDS_FRESH_S = 0.1

_PHASES = {
    worker_pb2.PHASE_SERVING: WhyNot.ELIGIBLE,
    worker_pb2.PHASE_RECOVERING: WhyNot.RECOVERING,
    worker_pb2.PHASE_DRAINING: WhyNot.DRAINING,
}


class _Column:
    """Rows of a pool's table. Plain numbers: every state and every decision reads them, and enums are slow at that."""

    TOLD = slice(0, 7)  # by every state, in this order:
    LAST_SEEN, QUEUED, REQUESTS, RATE, MAX_TOKENS, KV_BYTES, PULL_RATE = range(7)
    WHY_NOT = 7
    STEP_MS = 8
    STEP_BATCH = 9  # 0: before any request
    STEP_AT = 10  # when STEP_MS was measured
    UNACKED_TOKENS = 11
    UNACKED = 12
    WORK = 13  # tokens that it has computed, decaying with WORK_HALF_LIFE_S
    TOKEN_S = 14  # seconds for a token of a prompt, 1 / RATE averaged with TOKEN_HALF_LIFE_S
    BUSY_AT = 15  # when it first said that it had requests; 0: not yet
    SILENT_S = 16  # without a word for longer than this it is taken to be stopped
    COUNT = 17


@dataclass(slots=True)
class _Dispatch:
    seq: int
    tokens: int
    expires_at: float


@dataclass(slots=True)
class Member:
    """One worker. Its numbers are in its pool's table, in the row `index`."""

    worker_id: str
    address: str
    breaker: Breaker
    index: int
    identity: int  # hash64 of the worker id
    verdict: WhyNot = WhyNot.DISCONNECTED  # as far as its state tells
    state: worker_pb2.WorkerState = field(default_factory=worker_pb2.WorkerState)
    incarnation: str = ""
    computed: int = 0  # tokens since its incarnation began, as it has told
    connected: bool = False
    draining: bool = False  # asked to by this router: do not wait until the worker says so
    dispatches: deque[_Dispatch] = field(default_factory=deque)  # not acknowledged yet


class Pool:
    """Members of one model and the table that decisions are made from. `clock` is monotonic, in seconds."""

    def __init__(self, model: str, saturation_s: float, clock: Callable[[], float]) -> None:
        self.model = model
        self.members: dict[str, Member] = {}
        self.saturation_s = saturation_s
        self._clock = clock
        self._table: Floats = np.zeros((_Column.COUNT, 0))  # [columns, n_workers]
        self._ids: tuple[str, ...] = ()
        self._identities = np.zeros(0, dtype=np.uint64)
        self._even = np.zeros(0), np.zeros(0), np.zeros(0)  # shares, excess, load shares of a fleet that is not busy
        self._unexpired: deque[tuple[float, Member]] = deque()
        self._tripped: dict[str, Member] = {}
        self._work_since = clock()  # when a unit of work last weighed 1
        self._growth = StepGrowth()
        self._known_speeds: Speeds | None = None
        self._speeds_at = 0.0

    def add(self, worker_id: str, address: str, limits: BreakerLimits) -> None:
        """A worker joins, not connected yet."""
        if worker_id in self.members:
            self.remove(worker_id)
        self.members[worker_id] = Member(worker_id, address, Breaker(limits), len(self._ids), hash64(worker_id))
        row = np.zeros((_Column.COUNT, 1))
        row[_Column.WHY_NOT] = WhyNot.DISCONNECTED
        row[_Column.SILENT_S] = SILENT_S
        self._table = np.concatenate([self._table, row], axis=1)
        self._renumber()

    def remove(self, worker_id: str) -> None:
        """A worker leaves."""
        member = self.members.pop(worker_id)
        self._tripped.pop(worker_id, None)
        self._table = np.delete(self._table, member.index, axis=1)
        member.dispatches.clear()
        self._renumber()

    def _renumber(self) -> None:
        self._known_speeds = None
        self._even = np.ones(len(self.members)), np.zeros(len(self.members)), np.ones(len(self.members))
        self._ids = tuple(self.members)
        self._identities = np.array([member.identity for member in self.members.values()], dtype=np.uint64)
        for index, member in enumerate(self.members.values()):
            member.index = index

    def update(self, worker_id: str, state: worker_pb2.WorkerState, router_id: str) -> None:
        """A worker has told its state."""
        member = self.members[worker_id]
        if state.incarnation != member.incarnation:
            self._restarted(member)
            member.computed = state.computed_tokens  # what it did before it was known here gives others no claim
        member.state, member.incarnation, member.connected = state, state.incarnation, True
        column, now, running = self._table[:, member.index], self._clock(), state.running
        column[_Column.SILENT_S] = SILENT_BEATS * state.heartbeat_ms / 1e3 or SILENT_S
        if not column[_Column.RATE]:  # its first word: until now it was taken to be like the others
            self._known_speeds = None
        if rate := state.prefill_tokens_per_s:
            # What was measured before the first request, and by the first few, is soon outweighed.
            half_life_s = min(now - column[_Column.BUSY_AT], TOKEN_HALF_LIFE_S) if column[_Column.BUSY_AT] else 0.0
            old = math.exp2((column[_Column.LAST_SEEN] - now) / half_life_s) if half_life_s else 0.0
            column[_Column.TOKEN_S] = old * column[_Column.TOKEN_S] + (1.0 - old) / rate
        if running and not column[_Column.BUSY_AT]:
            column[_Column.BUSY_AT] = now
        column[_Column.TOLD] = (
            now,
            state.queued_prefill_tokens,
            running + state.waiting,
            state.prefill_tokens_per_s,
            state.max_request_tokens,
            state.kv_bytes_per_token,
            state.pull_bytes_per_s,
        )
        if (step_ms := state.decode_step_ms) > 0 and (running or not column[_Column.STEP_BATCH]):
            # An idle worker keeps the pair of its last busy moment: alone, the time of a step says nothing.
            column[_Column.STEP_MS], column[_Column.STEP_BATCH], column[_Column.STEP_AT] = step_ms, running, now
            if running:
                self._growth.learn(running, step_ms)
        weight = self._work_weight(now)  # may rescale the column: not in the same expression
        column[_Column.WORK] += (state.computed_tokens - member.computed) * weight
        member.computed = state.computed_tokens
        self._judge(member)
        if member.dispatches and (acked := state.acked.get(router_id, 0)):
            self._acknowledge(member, acked)

    def heard(self, worker_id: str) -> None:
        """A worker has told that its state is what it was."""
        self._table[_Column.LAST_SEEN, self.members[worker_id].index] = self._clock()

    def _restarted(self, member: Member) -> None:
        self._acknowledge(member, 1 << 64)
        member.breaker = Breaker(member.breaker.limits)
        member.draining = False
        self._tripped.pop(member.worker_id, None)
        self._table[[_Column.STEP_MS, _Column.STEP_BATCH, _Column.RATE, _Column.BUSY_AT], member.index] = 0.0

    def disconnected(self, worker_id: str) -> None:
        """Its state stream is broken: whatever it is doing, new requests go elsewhere."""
        member = self.members[worker_id]
        member.connected = False
        self._judge(member)

    def set_draining(self, worker_id: str, draining: bool) -> None:
        """Whether this router has asked it to drain; ends by itself when the worker restarts."""
        member = self.members[worker_id]
        member.draining = draining
        self._judge(member)

    def _judge(self, member: Member) -> None:
        verdict = _PHASES.get(member.state.phase, WhyNot.LOADING)
        if member.draining:
            verdict = WhyNot.DRAINING
        if not member.connected:
            verdict = WhyNot.DISCONNECTED
        if verdict is member.verdict:
            return
        if verdict is WhyNot.ELIGIBLE:
            self._catch_up(member.index)
        member.verdict = verdict
        self._table[_Column.WHY_NOT, member.index] = verdict

    def _catch_up(self, index: int) -> None:
        """A worker that comes has no claim to the work done without it, or all sessions would move there at once."""
        others = self._table[_Column.WORK, self._table[_Column.WHY_NOT] == WhyNot.ELIGIBLE]
        if len(others):
            self._table[_Column.WORK, index] = max(self._table[_Column.WORK, index], others.mean())

    def book(self, worker_id: str, seq: int, tokens: int) -> None:
        """A request is on its way there, with `tokens` to prefill. `seq` grows from dispatch to dispatch."""
        member, now = self.members[worker_id], self._clock()
        member.breaker.called(now)
        member.dispatches.append(_Dispatch(seq, tokens, now + UNACKNOWLEDGED_S))
        self._unexpired.append((now + UNACKNOWLEDGED_S, member))
        self._count_unacknowledged(member, tokens, 1)

    def _work_weight(self, now: float) -> float:
        """New work weighs more and more instead of old work less and less; rescaled before that overflows."""
        weight = math.exp2(min((now - self._work_since) / WORK_HALF_LIFE_S, 1000.0))
        if weight > 1e9:
            self._table[_Column.WORK] /= weight
            self._work_since, weight = now, 1.0
        return weight

    def unbook(self, worker_id: str, seq: int) -> None:
        """A dispatch that was booked went elsewhere after all."""
        member = self.members.get(worker_id)
        dispatch = next((d for d in member.dispatches if d.seq == seq), None) if member else None
        if member is None or dispatch is None:
            return
        member.dispatches.remove(dispatch)
        member.breaker.no_verdict(self._clock())
        self._count_unacknowledged(member, -dispatch.tokens, -1)

    def _acknowledge(self, member: Member, seq: int) -> None:
        tokens = count = 0
        while member.dispatches and member.dispatches[0].seq <= seq:
            tokens += member.dispatches.popleft().tokens
            count += 1
        self._count_unacknowledged(member, -tokens, -count)

    def _count_unacknowledged(self, member: Member, tokens: int, dispatches: int) -> None:
        self._table[_Column.UNACKED_TOKENS, member.index] += tokens
        self._table[_Column.UNACKED, member.index] += dispatches

    def _expire(self, now: float) -> None:
        while self._unexpired and self._unexpired[0][0] <= now:
            _, member = self._unexpired.popleft()
            while member.dispatches and member.dispatches[0].expires_at <= now:
                self._acknowledge(member, member.dispatches[0].seq)

    def fault(self, worker_id: str, incarnation: str) -> None:
        """A request failed there; reports about an earlier incarnation are ignored."""
        if member := self._incarnate(worker_id, incarnation):
            member.breaker.fault(self._clock())
            if member.breaker.state(self._clock()) is not BreakerState.CLOSED:
                self._tripped[worker_id] = member

    def success(self, worker_id: str, incarnation: str) -> None:
        """A request ended well there."""
        if member := self._incarnate(worker_id, incarnation):
            member.breaker.success(self._clock())
            if member.breaker.state(self._clock()) is BreakerState.CLOSED:
                self._tripped.pop(worker_id, None)

    def no_verdict(self, worker_id: str, incarnation: str) -> None:
        """A request ended there for reasons that are not the worker's."""
        if member := self._incarnate(worker_id, incarnation):
            member.breaker.no_verdict(self._clock())

    def _incarnate(self, worker_id: str, incarnation: str) -> Member | None:
        member = self.members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def is_live(self, worker_id: str) -> bool:
        """Whether its state stream is open and speaking."""
        member = self.members[worker_id]
        return member.connected and self._table[_Column.LAST_SEEN, member.index] >= self._clock() - SILENT_S

    def breaker_states(self) -> list[BreakerState]:
        """Of every member, now."""
        now = self._clock()
        return [member.breaker.state(now) for member in self.members.values()]

    def snapshot(self) -> Snapshot:
        """The pool at this moment."""
        now, table = self._clock(), self._table
        self._expire(now)
        speeds = self._speeds(now)
        queued = table[_Column.QUEUED] + table[_Column.UNACKED_TOKENS]
        load = table[_Column.REQUESTS] + table[_Column.UNACKED]
        why_not = self._why_not(queued > self.saturation_s * speeds.prefill_rate, now)
        shares = self._shares(now, speeds, load, queued, why_not == 0)
        share, excess, load_share = shares or self._even
        return Snapshot(
            worker_ids=self._ids,
            identities=self._identities,
            why_not=why_not,
            queued_tokens=queued,
            load=load,
            busy=shares is not None,
            share=share,
            excess=excess,
            load_share=load_share,
            speeds=speeds,
        )

    def _shares(
        self, now: float, speeds: Speeds, load: Floats, queued: Floats, eligible: NDArray[np.bool_]
    ) -> tuple[Floats, Floats, Floats] | None:
        """Work of each worker relative to the mean of the eligible ones, how much of it is beyond that, and its load.

        What it has computed, by its own word, and what is queued there: what was expected of its prefix cache when a
        request was placed may turn out wrong, and other routers place requests, too. None while the fleet is not busy:
        all have their share.
        """
        # Sums as products with 0 and 1: several times as fast as indexing with a mask.
        counts, n = eligible.astype(np.float64), np.count_nonzero(eligible)
        if load @ counts < BUSY_LOAD * n:
            return None
        relative_load = load / speeds.similar_rate
        work = self._table[_Column.WORK] / self._work_weight(now) + queued
        relative = work / speeds.similar_rate
        if not (done := relative @ counts):
            return None
        share = relative * (n / done)
        return share, work * (1.0 - 1.0 / np.maximum(share, 1.0)), relative_load * (n / (relative_load @ counts))

    def _why_not(self, saturated: NDArray[np.bool_], now: float) -> NDArray[np.uint8]:
        why_not: NDArray[np.uint8] = self._table[_Column.WHY_NOT].astype(np.uint8)
        silent = self._table[_Column.LAST_SEEN] < now - self._table[_Column.SILENT_S]
        for verdict, found in ((WhyNot.SILENT, silent), (WhyNot.SATURATED, saturated)):
            if np.count_nonzero(found):  # seldom; a masked assignment takes ten times as long
                why_not[found & (why_not == 0)] = verdict
        tripped = [(member.index, member.breaker) for member in self._tripped.values()]
        for index in ejected(tripped, len(self._ids), now):
            why_not[index] = why_not[index] or WhyNot.BREAKER
        return why_not

    def _speeds(self, now: float) -> Speeds:
        """They are half of the work of a decision, which is why they are kept for a moment."""
        if self._known_speeds is None or now - self._speeds_at >= SPEEDS_FRESH_S:
            table, self._speeds_at = self._table, now
            told = Told(
                prefill_rate=table[_Column.RATE],
                token_s=table[_Column.TOKEN_S],
                step_ms=table[_Column.STEP_MS],
                step_batch=table[_Column.STEP_BATCH],
                step_age_s=now - table[_Column.STEP_AT],
                probed=(table[_Column.BUSY_AT] == 0) | (table[_Column.BUSY_AT] > now - PROBED_S),
                max_request_tokens=table[_Column.MAX_TOKENS],
                kv_bytes_per_token=table[_Column.KV_BYTES],
                pull_bytes_per_s=table[_Column.PULL_RATE],
                batch_doubles=self._growth.batch_doubles,
            )
            self._known_speeds = speeds_of(told)
        return self._known_speeds
