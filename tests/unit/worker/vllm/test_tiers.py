"""Tiers of KV blocks are the native engine's."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from services.common.lifecycle import StartupError
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.metrics import WorkerMetrics
from services.worker.settings import WorkerSettings
from services.worker.vllm.opening import open_vllm
from tests.models import BUNDLED_MODEL


@pytest.mark.parametrize(
    ("chosen", "name"), [({"disk_cache": "/tmp/kv"}, "DISK_CACHE"), ({"host_cache_gib": 1.0}, "HOST_CACHE_GIB")]
)
async def test_vllm_refuses_tiers_of_the_native_engine(chosen: dict[str, object], name: str) -> None:
    settings = WorkerSettings.model_validate({"model": str(BUNDLED_MODEL), "engine": "vllm", **chosen})
    registry = CollectorRegistry()
    with pytest.raises(StartupError, match=f"RYZANSTEIN_{name}: is the native engine's"):
        await open_vllm(settings, BUNDLED_MODEL, WorkerMetrics(registry), LifeMetrics(registry))
