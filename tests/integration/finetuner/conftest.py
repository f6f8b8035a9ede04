"""The installation that tests of the fine-tuner share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.common.fine_tuning.store import TuningStore
from services.common.keys import RedisKeys
from services.common.redis_client import RedisAccess, open_redis
from services.finetuner.main import patiently
from tests.integration.finetuner.api_server import FaultyApi
from tests.integration.finetuner.site import TEMPLATE, Site
from tests.integration.gateway.redis_server import running_redis
from tests.kube_api import running_kube_api
from tests.redis_users import SERVER


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    for name in ("cluster.runner._LOOK_S", "cluster.runner._AGAIN_S", "job._PAUSE_S", "job._REPORT_S"):
        monkeypatch.setattr(f"services.finetuner.{name}", 0.02)
    with (
        running_redis(tmp_path, str(SERVER)) as redis,
        running_kube_api(FaultyApi(), tmp_path, monkeypatch) as api,
    ):
        (tmp_path / "job.json").write_text(json.dumps(TEMPLATE))
        store = TuningStore(open_redis(RedisAccess(redis.url), 5.0), RedisKeys("default"), patiently, 3600)
        yield Site(redis, api, tmp_path, store)
