"""`keep_alive` of a request's body: how long its model stays awake goes to the router."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack

HELLO = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"messages": HELLO, "max_tokens": 1},
}


@pytest.fixture
async def stack() -> AsyncIterator[GatewayStack]:
    async with running_stack([Worker("w0", template="{% for m in messages %}{{ m.content }}{% endfor %}")]) as running:
        yield running


async def test_keep_alive_reaches_the_router_in_seconds(stack: GatewayStack) -> None:
    for path, body in BODIES.items():
        for given, seconds in (("1h30m", 5400), ("-1", -1), ("250ms", 0.25), (0, 0), (-1.5, -1.5), (20, 20)):
            answer = await stack.http.post(path, json=body | {"keep_alive": given})
            assert answer.status_code == 200, answer.text
            assert stack.router.routes[-1].keep_alive_s == seconds, (path, given)
        await stack.http.post(path, json=body | {"keep_alive": None})
        assert not stack.router.routes[-1].HasField("keep_alive_s")


async def test_malformed_keep_alive_is_refused_by_name(stack: GatewayStack) -> None:
    for given in ("", "5 m", "m", "5x", "1m-5s", "--1", "1e3", "∞", "9" * 70, True, [], {}, 1e300):
        for path, body in BODIES.items():
            refused = await stack.http.post(path, json=body | {"keep_alive": given})
            assert refused.status_code == 400, (path, refused.text)
            assert "`keep_alive`" in refused.json()["error"]["message"]
        assert not stack.router.routes
