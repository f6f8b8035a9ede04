"""Tiers of KV blocks that do not fit the worker or its model end the start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from services.common.lifecycle import StartupError
from services.compute.backends.sizing import HostRoom
from services.worker.native.startup import check_tiers, group_config, read_model, require_room
from services.worker.settings import WorkerSettings
from tests.models import BUNDLED_MODEL
from tests.unit.compute.model.zoo import write_with_tokenizer


def test_host_cache_counts_as_memory_of_the_worker() -> None:
    files, room = read_model(BUNDLED_MODEL), HostRoom(2 << 30, None)
    for gib, fits in ((0.5, True), (4.0, False)):
        settings = WorkerSettings(model=str(BUNDLED_MODEL), kv_tokens=1024, host_cache_gib=gib)
        config = group_config(settings, files)
        if fits:
            require_room(settings, files.spec, config, room)
        else:
            with pytest.raises(StartupError, match=r"host cache 4,096, .*RYZANSTEIN_HOST_CACHE_GIB"):
                require_room(settings, files.spec, config, room)


@pytest.mark.parametrize("change", [{"has_state": True}, {"caches": False}], ids=["no snapshots", "no KV cache"])
def test_model_that_continues_no_prompts_has_no_tiers(change: dict[str, bool]) -> None:
    settings = WorkerSettings(model=str(BUNDLED_MODEL), host_cache_gib=1.0)
    files = read_model(BUNDLED_MODEL)
    config = group_config(settings, files)
    for fits in (config, replace(config, has_state=True, snapshots=1)):
        check_tiers(settings, files.spec, fits)
    with pytest.raises(StartupError, match="RYZANSTEIN_HOST_CACHE_GIB: only for models"):
        check_tiers(settings, files.spec, replace(config, **change))


def test_model_without_keys_has_no_tiers(tmp_path: Path) -> None:
    write_with_tokenizer("mamba2", tmp_path)
    files, settings = read_model(tmp_path), WorkerSettings(model=str(tmp_path), disk_cache=str(tmp_path / "kv"))
    with pytest.raises(StartupError, match="RYZANSTEIN_DISK_CACHE: only for models"):
        check_tiers(settings, files.spec, group_config(settings, files))
