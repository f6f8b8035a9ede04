"""Curves of `bench.engine --curve` give back the times that were recorded."""

from __future__ import annotations

import pytest

from bench.curve import prefill_points
from services.worker.simulated.curve import DEFAULT_CURVE, StepCurve

ROWS = (16, 64, 256, 1024)


def test_recorded_prompts_take_as_long_with_the_keys_of_all_rows() -> None:
    key_s = 1e-6
    recorded = [0.01 + 1e-3 * n + key_s * n * n / 2 for n in ROWS]
    points = prefill_points(ROWS, recorded, key_s)
    curve = StepCurve.read(DEFAULT_CURVE).model_copy(update={"prefill": points, "prefill_key_s": key_s})
    assert [curve.seconds(0, 0.0, n, n * n / 2) for n in ROWS] == pytest.approx(recorded)
    assert curve.seconds(0, 0.0, 640, 640 * 320.0) == pytest.approx(0.01 + 0.64 + key_s * 640 * 320)


def test_recorded_prompts_never_take_less_time_than_shorter_prompts() -> None:
    points = prefill_points(ROWS, (0.02, 0.01, 0.3, 0.9), key_s=1.0)
    seconds = [point.seconds for point in points]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
