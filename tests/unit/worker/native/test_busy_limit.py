"""How long a rank may compute without a heartbeat: a part of a large layer takes minutes on a CPU."""

from __future__ import annotations

import os

from services.cli.stack.default_model import TINY_MODEL
from services.worker.engine.stall import StallDetector, StallLimits
from services.worker.native.startup import group_config, read_model
from services.worker.settings import WorkerSettings

LOOK_S = 0.25


def test_a_rank_on_a_cpu_is_not_lost_for_minutes_of_computing_and_is_for_a_quarter_of_an_hour() -> None:
    config = group_config(WorkerSettings(model=str(TINY_MODEL), device="cpu"), read_model(TINY_MODEL))
    limits = StallLimits(config.stall_timeout_s, config.busy_timeout_s)
    detector = StallDetector([os.getpid()], lambda: 7, lambda: "at step 7", lambda: limits)  # this process is running
    reasons = [detector.look(LOOK_S) for _ in range(int(15 * 60 / LOOK_S))]
    assert not any(reasons[: int(5 * 60 / LOOK_S)])
    assert "is busy without a heartbeat" in (reasons[-1] or "")
    assert detector.signs > len(reasons) - 10, "each look meanwhile has seen a sign of life"
