"""Errors of a gateway that cannot start, and its readiness."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from services.common.lifecycle import GaveUpError, StartupError
from services.common.ports import free_port
from services.gateway.main import running_gateway, serve
from services.gateway.names.table import RouteTable
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_stack
from tests.integration.gateway.placing import running_fleet


async def test_a_taken_port_is_named() -> None:
    async with running_stack([]) as first:
        port = first.gateway.http.port
        with pytest.raises(StartupError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
            async with running_gateway(fast_settings(gateway_port=port, host="127.0.0.1")):
                pass


async def test_the_body_of_an_answer_does_not_wait_until_its_head_is_acknowledged() -> None:
    async with running_stack([]) as stack:
        await status(stack, "/livez")
        (connection,) = stack.gateway.http.server_state.connections
        accepted = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def status(stack: GatewayStack, path: str) -> int:
    return (await stack.http.get(path)).status_code


async def test_gateway_without_workers_is_ready_and_answers_503() -> None:
    """A kubelet that took all gateways out would leave clients with refused connections."""
    worker = Worker("w0")
    async with running_stack([]) as stack:
        await eventually(lambda: stack.gateway.ready)
        assert (await status(stack, "/readyz"), await status(stack, "/health")) == (200, 503)
        refused = await stack.complete(prompt="a")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        assert refused.json()["error"]["code"] == "no_workers"
        await worker.start()
        stack.router.workers.append(worker)
        await eventually(lambda: stack.gateway.catalog.available())
        assert (await status(stack, "/readyz"), await status(stack, "/health")) == (200, 200)
        stack.router.hidden = {"w0"}
        await eventually(lambda: not stack.gateway.catalog.available())
        assert (await status(stack, "/readyz"), await status(stack, "/health")) == (200, 503)
        await stack.router.stop()
        await asyncio.sleep(0.3)
        assert await status(stack, "/readyz") == 200, "it decides alone now"
        await worker.stop()


async def test_a_gateway_that_reaches_no_router_or_no_worker_is_not_ready() -> None:
    """Neither must replace gateways that do."""
    async with running_stack([], router_addresses="127.0.0.1:1") as stack:
        await asyncio.sleep(0.5)
        assert await status(stack, "/readyz") == 503
    unreachable = Worker("w0")  # listed as serving, and not started
    async with running_stack([]) as stack:
        stack.router.workers.append(unreachable)
        async with running_gateway(fast_settings(router_addresses=stack.router.address)) as late:
            await asyncio.sleep(0.5)
            assert not late.ready
            await unreachable.start()
            await eventually(lambda: late.ready)
            await unreachable.stop()


async def test_gateway_drains_and_gives_up_when_a_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its knowledge would grow old, and its readiness would hide that."""
    broken, refresh = asyncio.Event(), RouteTable.refresh

    async def refresh_until_broken(table: RouteTable) -> None:
        if broken.is_set():
            raise ZeroDivisionError
        await refresh(table)

    monkeypatch.setattr(RouteTable, "refresh", refresh_until_broken)
    worker = Worker("w0", step_s=0.1)
    async with running_fleet([worker]) as router, httpx.AsyncClient(trust_env=False, timeout=120) as http:
        settings = fast_settings(
            router_addresses=router.address, gateway_port=free_port(), drain_delay_s=1.0, drain_timeout_s=60.0
        )
        url = f"http://127.0.0.1:{settings.gateway_port}"
        serving = asyncio.create_task(serve(settings, asyncio.Event()))

        async def readiness() -> int:
            try:
                return (await http.get(f"{url}/readyz")).status_code
            except httpx.ConnectError:
                return 0

        while await readiness() != 200:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.05)
        answer = asyncio.create_task(http.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 50}))
        await eventually(lambda: worker.submits)
        broken.set()
        while await readiness() == 200:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.05)
        assert (await answer).json()["usage"]["completion_tokens"] == 50
        with pytest.raises(GaveUpError, match=r"RouteTable\.run has ended: ZeroDivisionError"):
            await serving
