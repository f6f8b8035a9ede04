"""Live routes that another gateway has just made, or that cannot be read: by this version, or while Redis is away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from services.gateway.names import table
from tests.integration.gateway.gateways import eventually, fast_settings, running_gateway
from tests.integration.gateway.test_model_routes import BIG, SMALL, ask, installation, routes_file, to


async def test_new_route_is_known_at_another_gateway_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_READ_EVERY_S", 3600)
    async with installation(tmp_path) as there:
        await there.routes("set", "chat", "--target", SMALL)
        await there.routes("set", "code", "--target", BIG)
        assert (await there.second.get("/v1/models/chat")).json()["targets"] == [SMALL]
        assert (await ask(there.second, "code")).json()["model"] == BIG
        for unknown in ("chat2", "nul\0", "x" * 1000):
            assert (await ask(there.second, unknown)).status_code == 404


async def test_unreadable_route_is_left_out_and_may_be_replaced(tmp_path: Path) -> None:
    async with installation(tmp_path) as there:
        there.redis.client.hset("rz:default:routes", "chat", "no route")
        there.redis.client.lpush("rz:default:routes-changes", '{"action": "of a later version"}')
        assert (await there.second.get("/v1/models/chat")).status_code == 404
        await there.routes("delete", "chat", fails="There is no live route `chat`")
        assert await there.routes("set", "chat", "--target", SMALL, "--if-version", "0") == "chat: version 1"
        await there.answered_everywhere("chat", SMALL)
        assert [change["version"] for change in json.loads(await there.routes("history", "--json"))] == [1]


async def test_gateway_that_starts_without_redis_has_the_routes_of_its_file_until_redis_is_back(tmp_path: Path) -> None:
    file = routes_file(tmp_path, chat=to(BIG))
    async with installation(tmp_path, routes_file=file) as there:
        await there.routes("set", "chat", "--target", SMALL)
        settings = {"routes_file": file, "redis_url": there.redis.url}
        there.redis.hide()
        await there.routes("delete", "chat", fails="Keys and routes cannot be reached at the moment.")
        async with running_gateway(fast_settings(router_addresses=there.first.router.address, **settings)) as third:
            await eventually(lambda: len(third.catalog.available()) == 2)
            url = f"http://127.0.0.1:{third.http.port}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http, asyncio.timeout(60):
                assert (await ask(http, "chat")).json()["model"] == BIG
                assert (await ask(http, "unknown")).status_code == 404
                there.redis.show()
                while (await ask(http, "chat")).json()["model"] != SMALL:  # noqa: ASYNC110  # no event tells
                    await asyncio.sleep(0.05)
