"""Derives the speeds of a pool's workers from what they measure and report."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.common.fitted_line import FittedLine
from services.router.snapshot import NEVER_MS, Floats, Speeds

# Half-life of an idle worker's step time: the usual step time replaces it gradually.
STEP_HALF_LIFE_S = 15.0
# Workers whose speeds differ by a smaller factor count as equal. Otherwise a worker with less load, which prefills in
# smaller and thus less efficient steps, would look slower and get even less.
SAME_SPEED = 2.0
# The batch size at which step time doubles its intercept: reading the weights costs as much as this many requests'
# attention and activations. The value before a measurement, and the bounds for a measured one.
BATCH_DOUBLES_STEP = 64.0
LEAST_DOUBLES, MOST_DOUBLES = 4.0, 256.0
# It is fitted over about this many reports, once there are enough reports and their batches vary enough.
GROWTH_WORDS = 2000.0
ENOUGH_WORDS, ENOUGH_VARIANCE = 100.0, 4.0
# A reported step time is capped at this many times the expected one, or at the mean: a delayed step says nothing about
# batches.
HELD_UP = 4.0
# Assumed until a worker of the pool has reported a measurement.
ASSUMED_PREFILL_RATE = 2000.0
ASSUMED_STEP_MS = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class ReportedSpeeds:
    """The reported speeds, [n_workers]; 0: unknown."""

    prefill_rate: Floats
    token_s: Floats  # seconds per prompt token, averaged over a longer time than the rate
    step_ms: Floats
    step_batch: Floats
    step_age_s: Floats
    probed: NDArray[np.bool_]  # it has had hardly any request: its speeds stem from the start-up probe
    max_request_tokens: Floats
    kv_bytes_per_token: Floats
    pull_bytes_per_s: Floats
    batch_doubles: float = BATCH_DOUBLES_STEP


class StepGrowth:
    """How the time of decode steps grows with their batch: a line fitted through a pool's recent reports.

    It makes step times comparable, of a worker with a batch of one and a worker with a batch of thirty.
    """

    def __init__(self) -> None:
        self._steps = FittedLine(GROWTH_WORDS)  # milliseconds over batch size

    def learn(self, batch: float, step_ms: float) -> None:
        """Add a report: a step with that batch takes that long."""
        if self._steps.weight >= ENOUGH_WORDS:
            least, slope = self._line()
            step_ms = min(step_ms, max(HELD_UP * (least + slope * batch), self._steps.mean_y))
        self._steps.learn(batch, step_ms)

    def _line(self) -> tuple[float, float]:
        """The intercept (the step time of an empty batch) and the slope (what each request adds)."""
        steps = self._steps
        slope = steps.slope if steps.variance >= ENOUGH_VARIANCE else 0.0
        return steps.mean_y - slope * steps.mean_x, slope

    @property
    def batch_doubles(self) -> float:
        """The batch size at which step time doubles its intercept."""
        if self._steps.weight < ENOUGH_WORDS:
            return BATCH_DOUBLES_STEP
        least, slope = self._line()
        if slope == 0.0:  # batches vary too little to fit a slope
            return BATCH_DOUBLES_STEP
        return min(max(least / slope, LEAST_DOUBLES), MOST_DOUBLES) if slope > 0 else MOST_DOUBLES


def speeds_of(reported: ReportedSpeeds) -> Speeds:
    """The speeds for decisions, in new arrays: those of `reported` may change."""
    similar_rate = _normalised(_unprobed(1.0 / _or_mean(reported.token_s, 1.0 / ASSUMED_PREFILL_RATE), reported.probed))
    batch = reported.batch_doubles + np.maximum(reported.step_batch, 1.0)
    batch_ms = _unprobed(_or_mean(reported.step_ms, ASSUMED_STEP_MS) / batch, reported.probed)
    batch_ms = _normalised(_renewed(batch_ms, reported.step_age_s))
    limits = reported.max_request_tokens.copy()
    movable = (reported.pull_bytes_per_s > 0) & (reported.kv_bytes_per_token > 0)
    bytes_per_ms = np.where(movable, reported.pull_bytes_per_s, 1.0) / 1000.0
    return Speeds(
        prefill_rate=_or_mean(reported.prefill_rate, ASSUMED_PREFILL_RATE),
        similar_rate=similar_rate,
        token_ms=1000.0 / similar_rate,
        step_ms=batch_ms * batch,
        batch_ms=batch_ms,
        least_batch_ms=float(batch_ms.min(initial=np.inf)),
        batch_doubles=reported.batch_doubles,
        max_request_tokens=limits,
        smallest_limit=limits[limits > 0].min(initial=np.inf),
        pull_token_ms=np.where(movable, reported.kv_bytes_per_token / bytes_per_ms, NEVER_MS),
    )


def _unprobed(speeds: Floats, probed: NDArray[np.bool_]) -> Floats:
    """Replace speeds that stem from probes by the median of the others: probes run while other processes start."""
    if not np.count_nonzero(probed):
        return speeds
    measured = speeds[~probed]
    return np.where(probed, _median(measured if len(measured) else speeds), speeds)


def _renewed(batch_ms: Floats, age_s: Floats) -> Floats:
    """Move old step times towards the usual one, the more the older they are.

    Otherwise a worker that was slow for a moment and then idle would never get a request again. The usual step time
    is the median weighted by freshness; one slow worker would dominate a mean, and all idle workers would inherit it.
    """
    weight = np.exp2(-np.minimum(age_s, 1000.0) / STEP_HALF_LIFE_S)
    known = weight.sum()
    if known < 1e-3:
        return batch_ms
    order = batch_ms.argsort()
    usual = batch_ms[order[np.searchsorted(weight[order].cumsum(), known / 2.0)]]
    renewed: Floats = weight * batch_ms + (1.0 - weight) * usual
    return renewed


def _normalised(speeds: Floats) -> Floats:
    """Replace speeds near the median by it: equal workers differ only by their load."""
    if not len(speeds):
        return speeds
    median = _median(speeds)
    return np.where((speeds > median / SAME_SPEED) & (speeds < median * SAME_SPEED), median, speeds)


def _median(values: Floats) -> float:
    return float(np.partition(values, len(values) // 2)[len(values) // 2])  # np.median takes three times as long


def _or_mean(values: Floats, default: float) -> Floats:
    """Replace unknown values (0) by the mean of the known ones, or by `default`."""
    unknown = values <= 0
    return np.where(unknown, default if unknown.all() else values[~unknown].mean(), values)
