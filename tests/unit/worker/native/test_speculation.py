"""The setting of speculation, from the worker's settings to ranks and scheduler."""

from __future__ import annotations

import pytest

from services.cli.stack.default_model import TINY_MODEL
from services.common.worker_options import Speculation
from services.worker.native.startup import group_config, read_model, scheduler_config
from services.worker.settings import WorkerSettings


@pytest.mark.parametrize(("setting", "speculates"), [("auto", True), ("off", False)])
def test_setting_reaches_ranks_and_scheduler(setting: Speculation, speculates: bool) -> None:
    settings = WorkerSettings(model=str(TINY_MODEL), device="cpu", speculation=setting)
    ranks = group_config(settings, read_model(TINY_MODEL))
    assert ranks.speculation is speculates
    assert scheduler_config(ranks, n_blocks=8).speculation is speculates


def test_speculation_is_on_by_default_and_has_two_values() -> None:
    assert WorkerSettings(model="m").speculation == "auto"
    with pytest.raises(ValueError, match="'auto' or 'off'"):
        WorkerSettings(model="m", speculation="on")  # type: ignore[arg-type]
