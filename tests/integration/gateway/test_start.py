"""Errors of a gateway that cannot start, and its readiness."""

from __future__ import annotations

import asyncio
import socket

import pytest

from services.common.lifecycle import StartupError
from services.gateway.main import running_gateway
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_stack


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
