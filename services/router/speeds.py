"""How fast the workers of a pool are, by what they have measured of themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.common.fitted_line import FittedLine
from services.router.snapshot import NEVER_MS, Floats, Speeds

# In this time half of what was known of an idle worker's step is forgotten.
STEP_HALF_LIFE_S = 15.0
# Measured speeds that differ by a smaller factor are those of equal workers: one that has less to do computes prompts
# in smaller steps, which are slower by the token, and would be given even less.
SAME_SPEED = 2.0
# The batch at which a decode step takes twice as long as for nobody: reading the weights costs as much as this many
# requests' attention and activations. Until that is measured, and what is believed of a measurement.
BATCH_DOUBLES_STEP = 64.0
LEAST_DOUBLES, MOST_DOUBLES = 4.0, 256.0
# It is measured over about so many words of workers, once there are enough of them and their batches vary enough.
GROWTH_WORDS = 2000.0
ENOUGH_WORDS, ENOUGH_VARIANCE = 100.0, 4.0
# Times what is expected that a word counts for at most, or the mean: a step that was held up tells nothing of batches.
HELD_UP = 4.0
# Until a worker has measured itself, and nobody else of its pool has either.
ASSUMED_PREFILL_RATE = 2000.0
ASSUMED_STEP_MS = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class ReportedSpeeds:
    """The workers' words, [n_workers]; 0: not known."""

    prefill_rate: Floats
    token_s: Floats  # seconds for a token of a prompt, over a longer time than the rate
    step_ms: Floats
    step_batch: Floats
    step_age_s: Floats
    probed: NDArray[np.bool_]  # it has hardly had a request: all it knows of itself is from a probe
    max_request_tokens: Floats
    kv_bytes_per_token: Floats
    pull_bytes_per_s: Floats
    batch_doubles: float = BATCH_DOUBLES_STEP


class StepGrowth:
    """How decode steps grow with their batch: a line through what the workers of a pool have told lately.

    By it a worker whose last step was for one request can be compared with one whose last was for thirty.
    """

    def __init__(self) -> None:
        self._steps = FittedLine(GROWTH_WORDS)  # milliseconds by batch

    def learn(self, batch: float, step_ms: float) -> None:
        """A worker has told how long a step with that batch takes."""
        if self._steps.weight >= ENOUGH_WORDS:
            least, slope = self._line()
            step_ms = min(step_ms, max(HELD_UP * (least + slope * batch), self._steps.mean_y))
        self._steps.learn(batch, step_ms)

    def _line(self) -> tuple[float, float]:
        """The step for nobody, and what each request adds."""
        steps = self._steps
        slope = steps.slope if steps.variance >= ENOUGH_VARIANCE else 0.0
        return steps.mean_y - slope * steps.mean_x, slope

    @property
    def batch_doubles(self) -> float:
        """The batch at which a step takes twice as long as for nobody."""
        if self._steps.weight < ENOUGH_WORDS:
            return BATCH_DOUBLES_STEP
        least, slope = self._line()
        if slope == 0.0:  # batches are all alike
            return BATCH_DOUBLES_STEP
        return min(max(least / slope, LEAST_DOUBLES), MOST_DOUBLES) if slope > 0 else MOST_DOUBLES


def speeds_of(reported: ReportedSpeeds) -> Speeds:
    """What decisions count with; none of the arrays is one of `reported`, which may change."""
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
        batch_doubles=reported.batch_doubles,
        max_request_tokens=limits,
        smallest_limit=limits[limits > 0].min(initial=np.inf),
        pull_token_ms=np.where(movable, reported.kv_bytes_per_token / bytes_per_ms, NEVER_MS),
    )


def _unprobed(speeds: Floats, probed: NDArray[np.bool_]) -> Floats:
    """Speeds of which those of mere probes are taken to be as usual: they ran while other processes started."""
    if not np.count_nonzero(probed):
        return speeds
    measured = speeds[~probed]
    return np.where(probed, _median(measured if len(measured) else speeds), speeds)


def _renewed(batch_ms: Floats, age_s: Floats) -> Floats:
    """Steps of which the old ones are taken to be more and more like what is usual among the new ones.

    A worker that was slow for a moment, perhaps for its neighbours' sake, and then idle would never be asked again.
    What is usual is the median by freshness: of a mean one such worker would be most, and all that are idle would be
    taken to be as slow.
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
    """Speeds of which those near the median are equal to it: workers of one kind differ by what they had to do."""
    if not len(speeds):
        return speeds
    median = _median(speeds)
    return np.where((speeds > median / SAME_SPEED) & (speeds < median * SAME_SPEED), median, speeds)


def _median(values: Floats) -> float:
    return float(np.partition(values, len(values) // 2)[len(values) // 2])  # np.median takes three times as long


def _or_mean(values: Floats, default: float) -> Floats:
    """Values that are not measured yet (0) are taken to be like the others'."""
    unknown = values <= 0
    return np.where(unknown, default if unknown.all() else values[~unknown].mean(), values)
