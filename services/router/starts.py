"""How far the start of a model is for which requests wait, and how long it still takes, as earlier starts did."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from ryzanstein.v1 import worker_pb2

from services.router.pool import Pool
from services.router.snapshot import IneligibleReason, Snapshot

UNKNOWN, PENDING, SCHEDULED, IMAGE, FETCHING = "unknown", "pending", "scheduled", "image", "fetching"
RECOVERING, SLEEPING, LOADING, WAKING, WARMING = "recovering", "sleeping", "loading", "waking", "warming"
STAGES = (UNKNOWN, PENDING, SCHEDULED, IMAGE, FETCHING, RECOVERING, SLEEPING, LOADING, WAKING, WARMING)
PAST_STARTS = 8  # starts of a model from a stage, whose median is the next estimate
SHORTEST_S = 1.0

_STAGES = {
    worker_pb2.PHASE_UNSPECIFIED: LOADING,  # the worker has its lease, and no state has come yet
    worker_pb2.PHASE_LOADING: LOADING,
    worker_pb2.PHASE_WAKING: WAKING,
    worker_pb2.PHASE_SLEEPING: SLEEPING,
    worker_pb2.PHASE_RECOVERING: RECOVERING,
}


Durations = Mapping[str, Sequence[float]]  # seconds from a stage to serving, by stage


@dataclass(frozen=True, slots=True)
class StartEstimate:
    """The stage of a model's start, and the seconds until a worker serves it; None: not known."""

    stage: str
    seconds: float | None


def serves(snapshot: Snapshot) -> bool:
    """Whether a worker serves the model, be it saturated."""
    return bool(np.isin(snapshot.why_not, (IneligibleReason.ELIGIBLE, IneligibleReason.SATURATED)).any())


@dataclass(frozen=True, slots=True)
class StartReport:
    """The stage of a start that has no worker yet."""

    stage: str
    text: str  # the stage for people, such as "fetching 3.1 of 5.0 GiB"


@dataclass(slots=True)
class Starts:
    """Follows the starts of all models. The clock is in seconds."""

    clock: Callable[[], float] = time.monotonic
    _entered: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> stage -> when the start reached it
    _took: dict[tuple[str, str], deque[float]] = field(default_factory=dict)  # seconds from a stage to serving
    reported: Mapping[str, StartReport] = field(default_factory=dict)  # starts without a worker, by model
    measured: set[str] = field(default_factory=set)  # models with new durations, for their keeper to discard

    def observe(self, pool: Pool, *, wanted: bool) -> bool:
        """Take note of a pool as it is now; return whether its last serving worker is gone since the last call.

        `wanted`: requests wait for it, which begins a start without a worker.
        """
        if serves(pool.snapshot()):
            self._served(pool.model)
            return False
        is_news = pool.model not in self._entered
        stage, now = self._stage(pool), self.clock()
        rank = STAGES.index(stage)
        entered = self._entered.get(pool.model, {})
        # A start that falls back, since its worker died, measures later stages anew.
        entered = {earlier: since for earlier, since in entered.items() if STAGES.index(earlier) <= rank}
        if not wanted and stage not in (LOADING, WAKING, RECOVERING, WARMING):
            entered.clear()
        elif not _is_assumed(stage, pool):
            entered.setdefault(stage, now)
        self._entered[pool.model] = entered
        return is_news

    def forget(self, models: Iterable[str]) -> None:
        """Drop what is known of models that no longer exist."""
        for model in models:
            self._entered.pop(model, None)
            self.measured.discard(model)
            for stage in STAGES:
                self._took.pop((model, stage), None)

    def _served(self, model: str) -> None:
        for stage, since in self._entered.pop(model, {}).items():
            took = self._took.setdefault((model, stage), deque(maxlen=PAST_STARTS))
            took.append(self.clock() - since)
            self.measured.add(model)

    def durations(self, model: str) -> Durations:
        """The measured durations of a model's starts, the oldest first."""
        return {stage: list(took) for stage in STAGES if (took := self._took.get((model, stage)))}

    def recall(self, model: str, durations: Durations) -> None:
        """Take durations over that were measured before all of this router."""
        for stage, seconds in durations.items():
            took = self._took.get((model, stage), ())
            self._took[model, stage] = deque([*seconds, *took], maxlen=PAST_STARTS)

    def estimate(self, pool: Pool) -> StartEstimate | None:
        """How far the model's start is; None while a worker serves it."""
        if serves(pool.snapshot()):
            return None
        stage, text = self._stage(pool), self._text(pool)
        typical_s = self._typical_s(pool, stage)
        if typical_s is None:
            return StartEstimate(text, None)
        now = self.clock()
        elapsed_s = now - self._entered.get(pool.model, {}).get(stage, now)
        # A start that takes longer than earlier ones takes perhaps a quarter longer yet.
        return StartEstimate(text, max(typical_s - elapsed_s, elapsed_s / 4, SHORTEST_S))

    def _stage(self, pool: Pool) -> str:
        """The stage of the worker that will serve first."""
        stages = {_stage_of(member.state) for member in pool.members.values()}
        if pool.model in self.reported:
            stages.add(self.reported[pool.model].stage)
        return max(stages, key=STAGES.index, default=UNKNOWN)

    def _text(self, pool: Pool) -> str:
        """The stage for people."""
        stage, report = self._stage(pool), self.reported.get(pool.model)
        return report.text if report and report.stage == stage else stage

    def _typical_s(self, pool: Pool, stage: str) -> float | None:
        if took := self._took.get((pool.model, stage)):
            return median(took)
        wakes = [member.state.wake_ms / 1000 for member in pool.members.values() if member.state.wake_ms]
        return min(wakes) if wakes and stage in (SLEEPING, WAKING) else None


def _is_assumed(stage: str, pool: Pool) -> bool:
    """Whether only workers without a state are in the stage: they may serve, and then nothing has started."""
    states = [member.state for member in pool.members.values()]
    known = [_stage_of(state) for state in states if state.phase]
    return len(known) < len(states) and stage not in known


def _stage_of(state: worker_pb2.WorkerState) -> str:
    """The stage of a worker that does not serve."""
    return WARMING if state.warming else _STAGES.get(state.phase, UNKNOWN)
