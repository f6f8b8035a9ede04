"""A gateway in the test's own event loop, served by a real uvicorn on a real port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest

from services.gateway import main, wiring
from services.gateway.generation import mirroring
from services.gateway.main import Gateway, running_gateway
from services.gateway.settings import GatewaySettings
from services.gateway.upstream import catalog, connection
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.placing import PlacingRouter, running_fleet


@dataclass
class GatewayStack:
    """Everything a test needs to talk to and to break."""

    gateway: Gateway
    router: PlacingRouter
    workers: list[Worker]
    client: openai.AsyncOpenAI
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.http.port}"

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body)


async def eventually(condition, timeout_s: float = 60.0) -> None:
    """Return once the condition holds; what it takes on a quiet machine is no matter of the tests."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  # the event happens in another process or library
            await asyncio.sleep(0.01)


def fast_settings(**overrides: Any) -> GatewaySettings:
    """Quick where something is waited for; patient where a busy machine must not be taken for a fault."""
    values: dict[str, Any] = {
        "gateway_port": 0,
        "progress_timeout_s": 10.0,
        "resume_deadline_s": 10.0,
        "drain_timeout_s": 1.0,
        "redis_timeout_s": 5.0,
    }
    return GatewaySettings(**(values | overrides))


@asynccontextmanager
async def running_stack(
    workers: Sequence[Worker] | None = None, *, traced: bool = False, refresh_s: float = 0.1, **overrides: Any
) -> AsyncIterator[GatewayStack]:
    """Workers, a router and a gateway that knows them."""
    fleet = [Worker("w0"), Worker("w1"), Worker("w2")] if workers is None else list(workers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "REFRESH_S", refresh_s)
        patch.setattr(connection, "CONNECT_TIMEOUT_S", 5.0)
        patch.setattr(mirroring, "_WAIT_S", 5.0)
        for module in (main, wiring):
            patch.setattr(module, "STORE_S", 5.0)
        async with (
            running_fleet(fleet) as router,
            running_gateway(
                fast_settings(**({"router_addresses": router.address} | overrides)), traced=traced
            ) as gateway,
        ):
            if fleet:
                await eventually(lambda: len(gateway.catalog.available()) >= len({w.model for w in fleet}))
            url = f"http://127.0.0.1:{gateway.http.port}"
            async with (
                httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http,
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120) as client,
            ):
                yield GatewayStack(gateway, router, fleet, client, http)
