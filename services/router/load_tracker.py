"""The load of workers: what they report, plus dispatches that they have not acknowledged; and their recent work."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import worker_pb2

from services.router.membership import Member
from services.router.snapshot import Floats, Speeds

# A worker that has not acknowledged a dispatch for this long never got it: the gateway died or gave up.
UNACKNOWLEDGED_S = 2.0
# Half-life of the recent work, by which shares are compared: longer than a request, shorter than a shift of load.
WORK_HALF_LIFE_S = 20.0
# Below this many requests per worker a step is hardly slower than for one request, so that unequal shares do no harm.
BUSY_LOAD = 4.0

# Rows of the table. The first two hold the worker's own counts plus its unacknowledged dispatches, ready to be copied
# into a snapshot. Work counts the tokens that a worker has computed; it decays with WORK_HALF_LIFE_S.
_QUEUED, _REQUESTS, _WORK = range(3)


@dataclass(slots=True)
class _Dispatch:
    seq: int
    tokens: int
    expires_at: float


@dataclass(slots=True)
class _Account:
    dispatches: deque[_Dispatch] = field(default_factory=deque)  # not acknowledged yet
    unacked_tokens: int = 0  # sum over `dispatches`
    computed: int = 0  # tokens since its process began, by its last state


class LoadTracker:
    """The load of a pool's members. Times are seconds of the pool's clock."""

    def __init__(self, now: float) -> None:
        self._table: Floats = np.zeros((3, 0))  # [rows, n_workers]
        self._accounts: dict[Member, _Account] = {}
        self._unexpired: deque[tuple[float, Member]] = deque()
        self._work_since = now  # when a new unit of work weighed 1

    def join(self, member: Member) -> None:
        """A worker joins, in the last column."""
        self._accounts[member] = _Account()
        self._table = np.concatenate([self._table, np.zeros((3, 1))], axis=1)

    def leave(self, member: Member, index: int) -> None:
        """The worker in column `index` leaves."""
        del self._accounts[member]
        self._table = np.delete(self._table, index, axis=1)

    def restarted(self, member: Member, computed: int) -> None:
        """The worker has a new process: drop its dispatches, and count its work from now on."""
        self._acknowledge(member, 1 << 64)
        self._accounts[member].computed = computed

    def on_state(self, member: Member, state: worker_pb2.WorkerState, now: float) -> None:
        """Apply a reported state: the queue, and the tokens computed since the last report."""
        account, index = self._accounts[member], member.index
        self._table[_QUEUED, index] = state.queued_prefill_tokens + account.unacked_tokens
        self._table[_REQUESTS, index] = state.running + state.waiting + len(account.dispatches)
        weight = self._work_weight(now)  # first, since it may rescale the row
        self._table[_WORK, index] += (state.computed_tokens - account.computed) * weight
        account.computed = state.computed_tokens

    def acknowledged(self, member: Member, state: worker_pb2.WorkerState, router_id: str) -> None:
        """Drop the dispatches that the worker has acknowledged: the reported counts include them."""
        if self._accounts[member].dispatches and (acked := state.acked.get(router_id, 0)):
            self._acknowledge(member, acked)

    def catch_up(self, member: Member, others: NDArray[np.bool_]) -> None:
        """Credit a newly eligible worker with the others' mean work, or all sessions would move to it at once."""
        work = self._table[_WORK, others]
        if len(work):
            self._table[_WORK, member.index] = max(self._table[_WORK, member.index], work.mean())

    def book(self, member: Member, seq: int, tokens: int, now: float) -> None:
        """Book a request with `tokens` to prefill. `seq` grows from dispatch to dispatch."""
        account = self._accounts[member]
        account.dispatches.append(_Dispatch(seq, tokens, now + UNACKNOWLEDGED_S))
        self._unexpired.append((now + UNACKNOWLEDGED_S, member))
        self._count(member, account, tokens, 1)

    def unbook(self, member: Member, seq: int) -> bool:
        """Take back a booked dispatch that went to another worker; return whether it was still counted."""
        account = self._accounts[member]
        dispatches = account.dispatches
        dispatch = next((d for d in dispatches if d.seq == seq), None)
        if dispatch is None:
            return False
        dispatches.remove(dispatch)
        self._count(member, account, -dispatch.tokens, -1)
        return True

    def expire(self, now: float) -> None:
        """Forget dispatches that have waited too long for an acknowledgement."""
        while self._unexpired and self._unexpired[0][0] <= now:
            _, member = self._unexpired.popleft()
            account = self._accounts.get(member)
            while account and account.dispatches and account.dispatches[0].expires_at <= now:
                self._acknowledge(member, account.dispatches[0].seq)

    def unacknowledged(self, member: Member) -> int:
        """How many dispatches the worker has not acknowledged."""
        return len(self._accounts[member].dispatches)

    def queued_tokens(self) -> Floats:
        """Tokens to prefill, [n_workers]; a new array."""
        queued: Floats = self._table[_QUEUED].copy()
        return queued

    def requests(self) -> Floats:
        """Requests that run, wait or are unacknowledged, [n_workers]; a new array."""
        requests: Floats = self._table[_REQUESTS].copy()
        return requests

    def shares(
        self, now: float, speeds: Speeds, load: Floats, queued: Floats, counts: Floats
    ) -> tuple[Floats, Floats, Floats] | None:
        """Each worker's work relative to the mean of the eligible ones, the tokens beyond that mean, its relative load.

        None while the fleet is not busy. Work is what the worker reports as computed, plus what is queued there. It is
        not the sum of what this router placed: other routers also place requests, and a prefix may turn out not to be
        cached. `counts` is 1 for eligible workers and 0 for others: a product with it sums several times as fast as
        indexing with a mask.
        """
        n = np.count_nonzero(counts)
        if load @ counts < BUSY_LOAD * n:
            return None
        relative_load = load / speeds.similar_rate
        work = self._table[_WORK] / self._work_weight(now) + queued
        relative = work / speeds.similar_rate
        if not (done := relative @ counts):
            return None
        share = relative * (n / done)
        return share, work * (1.0 - 1.0 / np.maximum(share, 1.0)), relative_load * (n / (relative_load @ counts))

    def _work_weight(self, now: float) -> float:
        """The weight of new work. It grows with time instead of old work decaying; rescaled before it overflows."""
        weight = math.exp2(min((now - self._work_since) / WORK_HALF_LIFE_S, 1000.0))
        if weight > 1e9:
            self._table[_WORK] /= weight
            self._work_since, weight = now, 1.0
        return weight

    def _acknowledge(self, member: Member, seq: int) -> None:
        account, tokens, count = self._accounts[member], 0, 0
        dispatches = account.dispatches
        while dispatches and dispatches[0].seq <= seq:
            tokens += dispatches.popleft().tokens
            count += 1
        self._count(member, account, -tokens, -count)

    def _count(self, member: Member, account: _Account, tokens: int, dispatches: int) -> None:
        account.unacked_tokens += tokens
        self._table[_QUEUED, member.index] += tokens
        self._table[_REQUESTS, member.index] += dispatches
