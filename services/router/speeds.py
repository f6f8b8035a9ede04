"""How fast the workers of a pool are, by what they have measured of themselves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.router.snapshot import NEVER_MS, Floats, Speeds

# In this time half of what was known of an idle worker's step is forgotten.
STEP_HALF_LIFE_S = 15.0
# Measured speeds that differ by a smaller factor are those of equal workers: one that has less to do computes prompts
# in smaller steps, which are slower by the token, and would be given even less.
SAME_SPEED = 2.0
# The batch at which a decode step takes twice as long as for one request: reading the weights costs as much as
# this many requests' attention and activations. Only ratios between near batch sizes depend on it.
BATCH_DOUBLES_STEP = 64.0
# Until a worker has measured itself, and nobody else of its pool has either.
ASSUMED_PREFILL_RATE = 2000.0
ASSUMED_STEP_MS = 20.0


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """The workers' words, [n_workers]; 0: not known."""

    prefill_rate: Floats
    token_s: Floats  # seconds for a token of a prompt, over a longer time than the rate
    step_ms: Floats
    step_batch: Floats
    step_age_s: Floats
    max_request_tokens: Floats
    kv_bytes_per_token: Floats
    pull_bytes_per_s: Floats


def speeds_of(told: Told) -> Speeds:
    """What decisions count with; none of the arrays is one of `told`, which may change."""
    rate = _or_mean(told.prefill_rate, ASSUMED_PREFILL_RATE)
    batch = BATCH_DOUBLES_STEP + np.maximum(told.step_batch, 1.0)
    batch_ms = _renewed(_or_mean(told.step_ms, ASSUMED_STEP_MS) / batch, told.step_age_s)
    limits = told.max_request_tokens.copy()
    movable = (told.pull_bytes_per_s > 0) & (told.kv_bytes_per_token > 0)
    bytes_per_ms = np.where(movable, told.pull_bytes_per_s, 1.0) / 1000.0
    return Speeds(
        prefill_rate=rate,
        token_ms=1000.0 / rate,
        similar_rate=_alike(1.0 / _or_mean(told.token_s, 1.0 / ASSUMED_PREFILL_RATE)),
        step_ms=batch_ms * batch,
        batch_ms=batch_ms,
        max_request_tokens=limits,
        smallest_limit=limits[limits > 0].min(initial=np.inf),
        pull_token_ms=np.where(movable, told.kv_bytes_per_token / bytes_per_ms, NEVER_MS),
    )


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


def _alike(rates: Floats) -> Floats:
    """Rates of which those near the median are equal to it: workers of one kind differ by what their prompts were."""
    if not len(rates):
        return rates
    median = np.partition(rates, len(rates) // 2)[len(rates) // 2]  # np.median takes three times as long
    return np.where((rates > median / SAME_SPEED) & (rates < median * SAME_SPEED), median, rates)


def _or_mean(values: Floats, default: float) -> Floats:
    """Values that are not measured yet (0) are taken to be like the others'."""
    unknown = values <= 0
    return np.where(unknown, default if unknown.all() else values[~unknown].mean(), values)
