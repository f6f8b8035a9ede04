"""The smallest fleets that meet targets, hour by hour, each with an interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from services.planner.replay import Replayed
from services.planner.trace import TraceRequest

Measure = Literal["first_token", "pace"]
HOUR_S = 3600.0
_DRAWS = 200  # resampled sets of windows
_LEVEL = 0.05  # share of them below and above the interval
_STEPS = 16  # sizes between a fleet that is certainly too small and twice its size


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """Most seconds that a share of the requests may take: `first_token_p95=1s`."""

    measure: Measure
    share: float  # such as 0.95
    seconds: float

    @property
    def name(self) -> str:
        """The name by which it is given."""
        return f"{self.measure}_p{self.share * 100:g}"

    def values(self, replayed: Replayed) -> np.ndarray:
        """The measure of every request, [n_requests]; pace only of those with several tokens."""
        if self.measure == "first_token":
            return np.array([outcome.first_token_s for outcome in replayed.outcomes])
        return np.array([outcome.pace_s or np.nan for outcome in replayed.outcomes])

    def met(self, values: np.ndarray) -> bool:
        """Whether the requests meet it."""
        values = values[~np.isnan(values)]
        return not len(values) or float(np.quantile(values, self.share)) <= self.seconds


@dataclass(frozen=True, slots=True)
class Need:
    """Workers that a part of a trace needs."""

    workers: int | None  # None: no fleet meets the targets
    low: int | None  # interval: 5 % of resampled traces need fewer than `low`, ...
    high: int | None  # ... and 5 % more than `high`
    measured: Mapping[str, float]  # seconds that the fleet of `workers` reaches, by the target's name
    busy: float = 0.0  # share of time in which its workers compute
    too_long: int = 0  # requests that no worker could take


Replay = Callable[[Sequence[TraceRequest], int], Replayed]


def workers_needed(
    trace: Sequence[TraceRequest], targets: Sequence[LatencyTarget], replay: Replay, most: int, window_s: float = 60.0
) -> Need:
    """The smallest fleet for a trace, of at most `most` workers.

    Sizes are tried upwards, so a tighter target never gets a smaller fleet. The interval comes from windows of
    `window_s`, drawn with replacement: it says how much the answer depends on which minutes the trace happened to have.
    """
    need: int | None = None
    low: int | None = None
    chosen: Replayed | None = None
    alone = replay(trace, 1)
    for size in _sizes(trace, alone, most):
        replayed = alone if size == 1 else replay(trace, size)
        share = _share_of_draws_that_meet(replayed, targets, window_s)
        if low is None and share >= _LEVEL:
            low = size
        if need is None and all(target.met(target.values(replayed)) for target in targets):
            need, chosen = size, replayed
        if need is not None and share >= 1 - _LEVEL:
            return _need(need, min(low or need, need), size, targets, chosen)
    return _need(need, low, None, targets, chosen)


def _need(
    need: int | None, low: int | None, high: int | None, targets: Sequence[LatencyTarget], chosen: Replayed | None
) -> Need:
    if need is None or chosen is None:
        return Need(None, low, high, {})
    measured = {
        target.name: float(np.nanquantile(values, target.share)) if not np.isnan(values).all() else 0.0
        for target in targets
        for values in [target.values(chosen)]
    }
    return Need(need, low, high, measured, chosen.busy_s / (chosen.span_s * need or 1.0), chosen.too_long)


def _sizes(trace: Sequence[TraceRequest], alone: Replayed, most: int) -> Iterator[int]:
    """Sizes to try, upwards, from half of what the work of a single worker would keep busy.

    Only half, because full batches and a crowded cache may cost a single worker more than a fleet.
    """
    span_s = max(trace[-1].at - trace[0].at, 1.0)
    least = max(1, math.floor(alone.busy_s / span_s / 2)) if len(trace) > 1 else 1
    size = min(least, most)
    while size <= most:
        yield size
        size += max(1, size // _STEPS)


def _share_of_draws_that_meet(replayed: Replayed, targets: Sequence[LatencyTarget], window_s: float) -> float:
    """The share of resampled traces whose requests meet all targets; the same draws for every fleet."""
    at = np.array([outcome.at for outcome in replayed.outcomes])
    windows = ((at - at[0]) // window_s).astype(int)
    names = np.unique(windows)
    draws = np.random.default_rng(0).integers(len(names), size=(_DRAWS, len(names)))
    members = [np.nonzero(windows == name)[0] for name in names]
    values = [target.values(replayed) for target in targets]
    met = 0
    for draw in draws:
        chosen = np.concatenate([members[index] for index in draw])
        met += all(target.met(value[chosen]) for target, value in zip(targets, values, strict=True))
    return met / _DRAWS


def by_hour(trace: Sequence[TraceRequest]) -> dict[float, list[TraceRequest]]:
    """The requests of each hour, by its start."""
    hours: dict[float, list[TraceRequest]] = {}
    for request in trace:
        hours.setdefault(request.at // HOUR_S * HOUR_S, []).append(request)
    return hours
