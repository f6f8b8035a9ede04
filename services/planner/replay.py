"""Replays a trace on workers in virtual time, placed by the router's own policy over the router's own snapshot."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.planner.cores import SharedCores
from services.planner.trace import TraceRequest
from services.planner.workers import ROUTER_ID, ReplayWorker, RequestTimes, WorkerKind, request_of
from services.router.breaker import BreakerLimits
from services.router.policies.policy import Policy
from services.router.pool import Pool
from services.router.snapshot import OffloadedPrefix, Query, hash64, why_not_for
from services.worker.engine.errors import TooLongError
from services.worker.scheduling.request import Request

SATURATION_S = 30.0  # the router's default


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """A request as its client saw it."""

    at: float  # arrival, on the trace's clock
    first_token_s: float
    pace_s: float  # seconds between tokens after the first; 0: there was one token only


@dataclass(frozen=True, slots=True)
class Replayed:
    """A whole trace on a fleet of a size."""

    outcomes: Sequence[ReplayedRequest]  # in the order of arrivals
    busy_s: float  # seconds of steps, summed over workers
    span_s: float  # from the first arrival to the last token
    computed: Sequence[int]  # tokens of prompts and answers that each worker computed
    hit_tokens: int  # tokens of prompts that were cached at their worker
    too_long: int = 0  # requests that no worker of the kind could take


class VirtualFleet:
    """Virtual workers and the router's view of them."""

    def __init__(self, kind: WorkerKind, policy: Policy, n_workers: int) -> None:
        self.now = self._began = 0.0  # `_began`: when the trace began, on its own clock
        self._policy = policy
        self._shared, self._cores = kind.shared_cores > 0, SharedCores(kind.shared_cores)
        self._tiered = kind.tier is not None
        self._workers = [ReplayWorker(f"worker-{n}", kind, self._clock, self._cores) for n in range(n_workers)]
        self._pool = Pool("planned", SATURATION_S, self._clock)
        for worker in self._workers:
            self._pool.add(worker.worker_id, "", BreakerLimits())
            self._pool.update(worker.worker_id, worker.state(), ROUTER_ID)
        self._wakes: list[tuple[float, int]] = []
        self._scheduled: list[float | None] = [None] * n_workers
        self._bound: dict[tuple[str, str], int] = {}  # session -> worker
        self._waiting: deque[tuple[Request, TraceRequest]] = deque()
        self._turn = 0
        self._ended: list[ReplayedRequest] = []
        self._too_long = 0

    def _clock(self) -> float:
        return self.now

    def run(self, trace: Sequence[TraceRequest]) -> Replayed:
        """Replay a trace, which is sorted by time, to its last token."""
        began = self._began = trace[0].at
        for number, source in enumerate(trace):
            self._run_until(source.at - began)
            self.now = max(self.now, source.at - began)
            self._arrive(request_of(source, number), source)
        self._run_until(math.inf)
        busy_s = sum(worker.busy_s for worker in self._workers)
        outcomes = sorted(self._ended, key=lambda outcome: outcome.at)
        computed = tuple(worker.computed_tokens for worker in self._workers)
        hit_tokens = sum(worker.scheduler.counters.prefix_hit_tokens for worker in self._workers)
        return Replayed(outcomes, busy_s, self.now, computed, hit_tokens, self._too_long)

    def _run_until(self, until: float) -> None:
        while self._wakes and self._wakes[0][0] <= until:
            at, index = heapq.heappop(self._wakes)
            if self._scheduled[index] != at:
                continue  # another time has been set since
            self._scheduled[index] = None
            self.now = max(self.now, at)
            for progress in self._workers[index].wake():
                self._ended.append(self._outcome(progress))
            self._report(index)
            while self._waiting and self._place(*self._waiting[0]):
                self._waiting.popleft()

    def _outcome(self, progress: RequestTimes) -> ReplayedRequest:
        more = progress.source.answer_tokens - 1
        pace_s = (progress.done_at - progress.first_at) / more if more else 0.0
        return ReplayedRequest(progress.source.at, progress.first_at - (progress.source.at - self._began), pace_s)

    def _arrive(self, request: Request, source: TraceRequest) -> None:
        request.extend_digests()
        if self._waiting or not self._place(request, source):
            self._waiting.append((request, source))

    def _place(self, request: Request, source: TraceRequest) -> bool:
        """Place a request as the router does; False: no worker takes one now."""
        session = (source.tenant, source.session)
        snapshot = self._pool.snapshot()
        query = Query(
            prompt_tokens=source.prompt_tokens,
            max_tokens=source.answer_tokens,
            request_key=hash64(str(self._turn)),
            session_key=hash64("\0".join(session)) if source.session else 0,
            bound=self._bound.get(session, -1) if source.session else -1,
            matched_tokens=self._matched(request),
            offloaded=self._offloaded(request),
            turn=self._turn,
        )
        decision = self._policy.choose(snapshot, query, why_not_for(snapshot, query))
        if decision is None:
            return False
        self._turn += 1
        worker, matched = self._workers[decision.index], query.matched_tokens
        cached = int(matched[decision.index]) if matched is not None else 0
        self._pool.book(worker.worker_id, self._turn, max(0, source.prompt_tokens - cached))
        worker.acked = self._turn
        if source.session:
            self._bound[session] = decision.index
        try:
            worker.submit(request, source)
        except TooLongError:
            self._too_long += 1
        self._report(decision.index)
        return True

    def _matched(self, request: Request) -> np.ndarray | None:
        if not (self._policy.uses_prefixes and request.digests):
            return None
        return np.array([worker.matched_tokens(request) for worker in self._workers], dtype=np.float64)

    def _offloaded(self, request: Request) -> OffloadedPrefix | None:
        if not (self._policy.uses_prefixes and request.digests and self._tiered):
            return None
        tokens, load_ms = zip(*(worker.offloaded_tokens(request) for worker in self._workers), strict=True)
        return OffloadedPrefix(np.array(tokens, dtype=np.float64), np.array(load_ms)) if any(tokens) else None

    def _report(self, index: int) -> None:
        worker = self._workers[index]
        self._pool.update(worker.worker_id, worker.state(), ROUTER_ID)
        changed = self._shared and self._cores.divide(self.now, sum(each.computes for each in self._workers))
        for each in range(len(self._workers)) if changed else (index,):
            self._schedule(each)

    def _schedule(self, index: int) -> None:
        at = self._workers[index].wake_at
        if at is not None and at != self._scheduled[index]:
            heapq.heappush(self._wakes, (at, index))
        self._scheduled[index] = at
