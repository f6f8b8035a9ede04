"""How many workers a pool needs: a pure function of its demand, its workers' measured speeds and its targets."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

# Part of a worker's time that arriving prompts may take; the rest is for decode steps.
PREFILL_SHARE = 0.7
# A pool shrinks only if the demand, this many times as large, fits the remaining workers.
SLACK = 1.2
# A pool with workers grows when the demand has been too large for this long: a start takes longer than a short burst.
SUSTAINED_S = 3.0
# After this many stabilisation times, a worker is removed even if others are emptier: it hands its requests over.
PATIENCE = 2.0


class Reason(StrEnum):
    """Why a pool changes, as a label of metrics; KEEP: it does not."""

    KEEP = "keep"
    HELD = "held"
    BACKLOG = "backlog"
    ARRIVALS = "arrivals"
    PACE = "pace"
    KV = "kv"
    BOUNDS = "bounds"
    SURPLUS = "surplus"
    IDLE = "idle"


@dataclass(frozen=True, slots=True)
class Targets:
    """The bounds of a pool and what its workers shall keep."""

    least: int  # replicas; 0: the pool may go to zero
    most: int
    first_token_s: float = 2.5
    token_ms: float = 100.0
    kv_share: float = 0.8  # share of the KV blocks in use
    idle_s: float = 600.0  # without a request, until a pool with least = 0 goes to zero
    down_after_s: float = 300.0  # how long fewer workers must have been enough


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests for a pool's models, at all routers and workers."""

    held: int = 0  # requests that no worker has taken
    held_tokens: int = 0  # their prompts
    tokens_per_s: float = 0.0  # prompt tokens of placed requests that no cache holds
    busy: int = 0  # requests that run or wait at workers
    queued_tokens: int = 0  # prompt tokens to compute at workers
    kv_used: int = 0  # KV blocks of running requests
    idle_s: float = 0.0  # since the last request was placed or refused
    complete: bool = True  # False: a router did not answer, so that there may be more

    @property
    def requests(self) -> int:
        """All requests that are there now."""
        return self.held + self.busy


@dataclass(frozen=True, slots=True)
class PoolCapacity:
    """Capabilities of a pool's workers. Speeds are those of one worker; 0: not measured."""

    replicas: int  # those of the StatefulSet
    workers: int = 0  # that routers know; one that is being removed counts until it has left
    prefill_rate: float = 0.0  # tokens per second
    batch: float = 0.0  # requests at which a token takes as long as its target
    kv_blocks: float = 0.0
    last_is_emptiest: bool = True  # the worker that the StatefulSet would remove


@dataclass(frozen=True, slots=True)
class History:
    """The past of a pool, as one leader has seen it. Times are seconds of its monotonic clock."""

    began: float
    raised_at: float  # when there were more replicas than before
    active_at: float  # when there was a request
    replicas: int
    needs: tuple[tuple[float, int], ...] = ()  # those of the last SUSTAINED_S, and the one before
    # Needs with slack during the stabilisation time, each larger than all after it: the first is the maximum.
    peaks: tuple[tuple[float, int], ...] = ()
    surplus_since: float = math.inf

    @classmethod
    def new(cls, now: float, replicas: int) -> History:
        """A leader begins. Until it has watched for the stabilisation time, it removes no worker."""
        return cls(began=now, raised_at=now, active_at=now, replicas=replicas)


@dataclass(frozen=True, slots=True)
class ScalingDecision:
    """The number of replicas, and why."""

    replicas: int
    reason: Reason
    load: float  # the demand in workers


def load(demand: Demand, capacity: PoolCapacity, targets: Targets) -> tuple[float, Reason]:
    """The demand in workers, as a fraction, and the term that is the largest.

    Terms without a measured speed are left out: until the first worker has measured itself, held requests ask for one.
    """
    terms = {Reason.HELD: 1.0 if demand.held else 0.0}
    if capacity.prefill_rate:
        tokens = demand.queued_tokens + demand.held_tokens
        terms[Reason.BACKLOG] = tokens / (capacity.prefill_rate * targets.first_token_s)
        terms[Reason.ARRIVALS] = demand.tokens_per_s / (capacity.prefill_rate * PREFILL_SHARE)
    if capacity.batch:
        terms[Reason.PACE] = demand.requests / capacity.batch
    if capacity.kv_blocks:
        terms[Reason.KV] = demand.kv_used / (capacity.kv_blocks * targets.kv_share)
    for reason in (Reason.BACKLOG, Reason.KV):  # a request runs on one worker, however long it is
        terms[reason] = min(terms.get(reason, 0.0), float(demand.requests))
    largest = max(terms, key=lambda reason: terms[reason])
    return terms[largest], largest


def desired(
    now: float, demand: Demand, capacity: PoolCapacity, targets: Targets, history: History
) -> tuple[ScalingDecision, History]:
    """The replicas that a pool shall have, and the history for the next call.

    Demand raises it, at zero at once. It shrinks by one worker at a time, when fewer have been enough for the
    stabilisation time and no worker was added during that time; to zero when no request came for the idle time.
    """
    workers, reason = load(demand, capacity, targets)
    history = _observed(now, demand, capacity, targets, history, workers)
    floor = targets.least or _floor_at_zero(now, demand, capacity, targets, history)

    def bounded(replicas: int) -> int:
        return min(max(replicas, floor), targets.most)

    replicas = capacity.replicas
    # Arrivals decay for hours: at zero, the pool starts for requests that are there, not for past ones.
    at_zero = history.needs[-1][1] if demand.requests else 0
    need = bounded(at_zero if replicas == 0 else _sustained(now, history.needs))
    peak = bounded(history.peaks[0][1])
    history = replace(history, surplus_since=min(history.surplus_since, now) if peak < replicas else math.inf)
    if need > replicas:
        return ScalingDecision(
            need, Reason.BOUNDS if need == floor and need > math.ceil(workers) else reason, workers
        ), history
    if replicas > targets.most:
        return ScalingDecision(targets.most, Reason.BOUNDS, workers), history
    if floor == 0 and replicas:
        return ScalingDecision(0, Reason.IDLE, workers), history
    if peak < replicas and _may_shrink(now, demand, capacity, targets, history):
        return ScalingDecision(replicas - 1, Reason.SURPLUS, workers), history
    return ScalingDecision(replicas, Reason.KEEP, workers), history


def _observed(
    now: float, demand: Demand, capacity: PoolCapacity, targets: Targets, history: History, workers: float
) -> History:
    """The history with this moment."""
    need, slack = math.ceil(workers), math.ceil(workers * SLACK)
    needs = [*history.needs, (now, need)]
    while len(needs) > 1 and needs[1][0] <= now - SUSTAINED_S:
        del needs[0]
    higher = [each for each in history.peaks if each[0] > now - targets.down_after_s and each[1] > slack]
    return replace(
        history,
        raised_at=now if capacity.replicas > history.replicas else history.raised_at,
        active_at=now if demand.requests else max(history.active_at, now - demand.idle_s),
        replicas=capacity.replicas,
        needs=tuple(needs),
        peaks=(*higher, (now, slack)),
    )


def _sustained(now: float, needs: tuple[tuple[float, int], ...]) -> int:
    """The workers that have been needed all the time for SUSTAINED_S; 0 if the history is shorter."""
    return min(need for _, need in needs) if needs[0][0] <= now - SUSTAINED_S else 0


def _floor_at_zero(now: float, demand: Demand, capacity: PoolCapacity, targets: Targets, history: History) -> int:
    """The fewest replicas of a pool that may go to zero: 0 while it is there without a request, or idle for long."""
    if demand.requests:
        return 1
    idle = demand.complete and now - max(history.active_at, history.raised_at) >= targets.idle_s
    return 0 if capacity.replicas == 0 or idle else 1


def _may_shrink(now: float, demand: Demand, capacity: PoolCapacity, targets: Targets, history: History) -> bool:
    """Whether a surplus worker may be removed now: one at a time, the emptiest, and not after a recent rise."""
    settled = now - max(history.began, history.raised_at) >= targets.down_after_s
    all_gone = capacity.workers <= capacity.replicas
    patient = now - history.surplus_since >= PATIENCE * targets.down_after_s
    return settled and demand.complete and all_gone and (capacity.last_is_emptiest or patient)
