"""Which web pages may use a gateway: one list for CORS, for requests that browsers send unasked, and for WebSockets."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import websockets

from services.gateway.settings import GatewaySettings
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack

LISTED = "https://chat.example.com"
FOREIGN = "https://evil.example"
BODY: dict[str, Any] = {"prompt": "a", "max_tokens": 1}


async def post(stack: GatewayStack, **headers: str) -> httpx.Response:
    return await stack.http.post("/v1/completions", json=BODY, headers=headers)


async def opens_a_socket(stack: GatewayStack, origin: str | None) -> bool:
    url = stack.url.replace("http", "ws") + "/v1/stream"
    try:
        async with websockets.connect(url, proxy=None, origin=origin):
            return True
    except websockets.InvalidStatus as error:
        refused = error.response
    reported = json.loads(refused.body)["error"]
    assert (refused.status_code, reported["code"]) == (403, "origin_not_allowed")
    assert origin in reported["message"]
    return False


async def test_another_page_can_use_a_keyless_gateway_in_no_way(stack: GatewayStack):
    own = stack.url
    for origin in (FOREIGN, "null", "http://localhost:1", own + "0"):
        answer = await post(stack, origin=origin)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
        assert not await opens_a_socket(stack, origin)
        sent = await stack.http.options(
            "/v1/completions", headers={"origin": origin, "access-control-request-method": "POST"}
        )
        assert sent.is_error
        read = await stack.http.get("/v1/models", headers={"origin": origin})
        assert not [name for name in [*sent.headers, *read.headers] if name.startswith("access-control")]
    assert not stack.workers[0].submits
    for origin in (None, own):
        assert (await post(stack, **({"origin": origin} if origin else {}))).status_code == 200
        assert await opens_a_socket(stack, origin)


async def test_a_name_that_points_at_loopback_is_not_its_own_address(stack: GatewayStack):
    rebound = f"evil.example:{stack.gateway.http.port}"
    assert (await post(stack, origin=f"http://{rebound}", host=rebound)).status_code == 403
    own = f"localhost:{stack.gateway.http.port}"
    assert (await post(stack, origin=f"http://{own}", host=own)).status_code == 200


async def test_listed_pages_may_ask_read_and_open_sockets():
    async with running_stack([Worker("w0")], allowed_origins=(LISTED,)) as stack:
        sent = await stack.http.options(
            "/v1/chat/completions",
            headers={
                "origin": LISTED, "access-control-request-method": "POST",
                "access-control-request-headers": "authorization,content-type",
            },
        )  # fmt: skip
        assert sent.status_code == 200
        assert sent.headers["access-control-allow-origin"] == LISTED
        assert sent.headers["access-control-allow-headers"] == "authorization,content-type"
        answers = [await post(stack, origin=LISTED), await stack.http.get("/v1/models", headers={"origin": LISTED})]
        bad = await stack.http.post("/v1/completions", json={}, headers={"origin": LISTED})
        for answer, status in zip([*answers, bad], (200, 200, 400), strict=True):
            assert answer.status_code == status
            assert answer.headers["access-control-allow-origin"] == LISTED
            assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert await opens_a_socket(stack, LISTED)
        assert (await post(stack, origin=FOREIGN)).status_code == 403
        assert not await opens_a_socket(stack, FOREIGN)


async def test_any_page_may_where_the_list_says_so():
    async with running_stack([Worker("w0")], allowed_origins=("*",)) as stack:
        answer = await post(stack, origin="null")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "*")
        assert await opens_a_socket(stack, FOREIGN)


async def test_body_of_another_media_type_gets_415(stack: GatewayStack):
    for media in ("text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded"):
        for path in ("/v1/completions", "/v1/embeddings", "/tokenize"):
            answer = await stack.http.post(path, content=json.dumps(BODY), headers={"content-type": media})
            assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    for fine in ({"content-type": "Application/JSON; charset=utf-8"}, {}):
        answer = await stack.http.post("/v1/completions", content=json.dumps(BODY), headers=fine)
        assert answer.status_code == 200


@pytest.mark.parametrize("entry", ["chat.example.com", "https://a.example/", "https://", "https://a.example/x"])
def test_an_entry_that_is_no_origin_is_refused_at_start(entry: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RYZANSTEIN_ALLOWED_ORIGINS", f"https://b.example,{entry}")
    with pytest.raises(ValueError, match="must be scheme://host"):
        GatewaySettings()
