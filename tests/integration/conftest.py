"""A real Redis for each test: that of a gateway, which can be frozen, and one that starts again under its URL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.gateway.redis_server import RedisServer, running_redis
from tests.integration.router import processes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as running:
        yield running


@pytest.fixture
def redis_server(tmp_path: Path) -> Iterator[processes.KillableRedis]:
    server = processes.KillableRedis(tmp_path)
    server.start()
    yield server
    server.kill()
