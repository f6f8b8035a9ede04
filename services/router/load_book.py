"""What workers have to do: by their own word, and by dispatches that they have not acknowledged; and what they did."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import worker_pb2

from services.router.membership import Member
from services.router.snapshot import Floats, Speeds

# A dispatch the worker has not acknowledged for this long was never submitted: its gateway died or gave up.
UNACKNOWLEDGED_S = 2.0
# Over what time shares of work are compared: long against a request, short against a shift of load.
WORK_HALF_LIFE_S = 20.0
# Below this many requests per worker a step is hardly slower than for one, and unequal shares harm nobody.
BUSY_LOAD = 4.0

# Rows of the table. The first two are a worker's own counts plus its unacknowledged dispatches, so that a decision
# copies them; work is tokens that a worker has computed, decaying with WORK_HALF_LIFE_S.
_QUEUED, _REQUESTS, _WORK = range(3)


@dataclass(slots=True)
class _Dispatch:
    seq: int
    tokens: int
    expires_at: float


@dataclass(slots=True)
class _Account:
    dispatches: deque[_Dispatch] = field(default_factory=deque)  # not acknowledged yet
    unacked_tokens: int = 0  # of those
    computed: int = 0  # tokens since its process began, as it has told


class LoadBook:
    """The load of a pool's members. Times come from the pool's clock, in seconds."""

    def __init__(self, now: float) -> None:
        self._table: Floats = np.zeros((3, 0))  # [rows, n_workers]
        self._accounts: dict[Member, _Account] = {}
        self._unexpired: deque[tuple[float, Member]] = deque()
        self._work_since = now  # when a unit of work last weighed 1

    def join(self, member: Member) -> None:
        """A worker comes, as the last one."""
        self._accounts[member] = _Account()
        self._table = np.concatenate([self._table, np.zeros((3, 1))], axis=1)

    def leave(self, member: Member, index: int) -> None:
        """The worker that was at `index` goes."""
        del self._accounts[member]
        self._table = np.delete(self._table, index, axis=1)

    def restarted(self, member: Member, computed: int) -> None:
        """What was on its way to the last process is lost; what this one did before it was known gives no claim."""
        self._acknowledge(member, 1 << 64)
        self._accounts[member].computed = computed

    def on_state(self, member: Member, state: worker_pb2.WorkerState, now: float) -> None:
        """Take what is queued there, and how much it has computed."""
        account, index = self._accounts[member], member.index
        self._table[_QUEUED, index] = state.queued_prefill_tokens + account.unacked_tokens
        self._table[_REQUESTS, index] = state.running + state.waiting + len(account.dispatches)
        weight = self._work_weight(now)  # may rescale the row: not in the same expression
        self._table[_WORK, index] += (state.computed_tokens - account.computed) * weight
        account.computed = state.computed_tokens

    def acknowledged(self, member: Member, state: worker_pb2.WorkerState, router_id: str) -> None:
        """What it has acknowledged is among what it tells."""
        if self._accounts[member].dispatches and (acked := state.acked.get(router_id, 0)):
            self._acknowledge(member, acked)

    def catch_up(self, member: Member, others: NDArray[np.bool_]) -> None:
        """A worker that comes has no claim to the work done without it, or all sessions would move there at once."""
        work = self._table[_WORK, others]
        if len(work):
            self._table[_WORK, member.index] = max(self._table[_WORK, member.index], work.mean())

    def book(self, member: Member, seq: int, tokens: int, now: float) -> None:
        """A request is on its way there, with `tokens` to prefill. `seq` grows from dispatch to dispatch."""
        account = self._accounts[member]
        account.dispatches.append(_Dispatch(seq, tokens, now + UNACKNOWLEDGED_S))
        self._unexpired.append((now + UNACKNOWLEDGED_S, member))
        self._count(member, account, tokens, 1)

    def unbook(self, member: Member, seq: int) -> bool:
        """A dispatch that was booked went elsewhere after all; whether it was still counted."""
        account = self._accounts[member]
        dispatches = account.dispatches
        dispatch = next((d for d in dispatches if d.seq == seq), None)
        if dispatch is None:
            return False
        dispatches.remove(dispatch)
        self._count(member, account, -dispatch.tokens, -1)
        return True

    def expire(self, now: float) -> None:
        """Forget the dispatches that nobody will acknowledge any more."""
        while self._unexpired and self._unexpired[0][0] <= now:
            _, member = self._unexpired.popleft()
            account = self._accounts.get(member)
            while account and account.dispatches and account.dispatches[0].expires_at <= now:
                self._acknowledge(member, account.dispatches[0].seq)

    def unacknowledged(self, member: Member) -> int:
        """How many dispatches it has not acknowledged."""
        return len(self._accounts[member].dispatches)

    def queued_tokens(self) -> Floats:
        """Tokens to prefill, [n_workers], as a new array."""
        queued: Floats = self._table[_QUEUED].copy()
        return queued

    def requests(self) -> Floats:
        """Requests running, waiting or on their way, [n_workers], as a new array."""
        requests: Floats = self._table[_REQUESTS].copy()
        return requests

    def shares(
        self, now: float, speeds: Speeds, load: Floats, queued: Floats, counts: Floats
    ) -> tuple[Floats, Floats, Floats] | None:
        """Work of each worker relative to the mean of the eligible ones, how much of it is beyond that, and its load.

        What it has computed, by its own word, and what is queued there: what was expected of its prefix cache when a
        request was placed may turn out wrong, and other routers place requests, too. None while the fleet is not busy:
        all have their share. `counts` is 1 for those that are eligible and 0 for others: sums as products with it are
        several times as fast as indexing with a mask.
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
        """New work weighs more and more instead of old work less and less; rescaled before that overflows."""
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
