"""Tiers of KV blocks that do not fit the worker or its model end the start."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.common.lifecycle import StartupError
from services.compute.backends.sizing import HostRoom
from services.worker.native.startup import check_tiers, group_config, read_model, require_room
from services.worker.settings import WorkerSettings
from tests.models import BUNDLED_MODEL


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


def test_model_with_states_has_no_tiers() -> None:
    settings = WorkerSettings(model=str(BUNDLED_MODEL), host_cache_gib=1.0)
    config = group_config(settings, read_model(BUNDLED_MODEL))
    check_tiers(settings, config)
    with pytest.raises(StartupError, match="RYZANSTEIN_HOST_CACHE_GIB: only for models"):
        check_tiers(settings, replace(config, has_state=True))
