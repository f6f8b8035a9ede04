"""Live routes that cannot be read: by this version, or while Redis is away."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx

from tests.integration.gateway.gateways import eventually, fast_settings, running_gateway
from tests.integration.gateway.test_model_routes import BIG, SMALL, ask, installation, routes_file, to


async def test_unreadable_route_is_left_out_and_may_be_replaced(tmp_path: Path) -> None:
    async with installation(tmp_path) as there:
        there.redis.client.hset("rz:default:routes", "chat", "no route")
        await there.routes("delete", "chat", fails="There is no live route `chat`")
        assert await there.routes("set", "chat", "--target", SMALL, "--if-version", "0") == "chat: version 1"
        await there.answered_everywhere("chat", SMALL)


async def test_gateway_that_starts_without_redis_has_the_routes_of_its_file_until_redis_is_back(tmp_path: Path) -> None:
    file = routes_file(tmp_path, chat=to(BIG))
    async with installation(tmp_path, routes_file=file, redis_timeout_s=1.0) as there:
        await there.routes("set", "chat", "--target", SMALL)
        settings = {"routes_file": file, "redis_url": there.redis.url, "redis_timeout_s": 1.0}
        there.redis.freeze()
        await there.routes("delete", "chat", fails="Keys and routes cannot be reached at the moment.")
        async with running_gateway(fast_settings(router_addresses=there.first.router.address, **settings)) as third:
            await eventually(lambda: len(third.catalog.available()) == 2)
            url = f"http://127.0.0.1:{third.http.port}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http, asyncio.timeout(60):
                assert (await ask(http, "chat")).json()["model"] == BIG
                there.redis.thaw()
                while (await ask(http, "chat")).json()["model"] != SMALL:  # noqa: ASYNC110  # no event tells
                    await asyncio.sleep(0.05)
