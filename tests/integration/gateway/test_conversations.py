"""/v1/conversations, compaction and opaque reasoning, with OpenAI's client on a scripted worker and a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from services.gateway.api.ignored import IGNORED_HEADER
from tests.integration.gateway import fleet
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_responses import PATH, create, post, prompts
from tests.integration.gateway.test_tenants import entry

CONVERSATIONS = "/v1/conversations"


@pytest.fixture
async def stack(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[GatewayStack]:
    monkeypatch.setattr(fleet, "MAX_LEN", 2048)
    async with running_stack([Worker("w0")], redis_url=server.url) as running:
        yield running


def message(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


async def test_unknown_fields_of_a_conversation_are_left_out_and_named(stack: GatewayStack) -> None:
    item = message("one") | {"mood": 1}
    made = await stack.http.post(CONVERSATIONS, json={"items": [item], "zeta": 1})
    assert (made.status_code, made.headers[IGNORED_HEADER]) == (200, "zeta, items[].mood")
    path = f"{CONVERSATIONS}/{made.json()['id']}"
    changed = await stack.http.post(path, json={"metadata": {}, "zeta": 1})
    assert (changed.status_code, changed.headers[IGNORED_HEADER]) == (200, "zeta")
    added = await stack.http.post(f"{path}/items", json={"items": [item, message("two", "critic")], "zeta": 1})
    assert (added.status_code, added.headers[IGNORED_HEADER]) == (200, "zeta, items[].mood")
    answer = await post(stack, input="three", conversation=made.json()["id"])
    assert (answer.status_code, answer.headers[IGNORED_HEADER]) == (200, "input[].role=critic")
    missing = await stack.http.get(f"{CONVERSATIONS}/conv_x")
    assert missing.json()["error"]["message"].startswith("Conversation with id `conv_x` not found")


async def test_turns_of_a_conversation_have_its_items_and_add_their_own(stack: GatewayStack) -> None:
    conversations = stack.client.conversations
    made = await conversations.create(items=[message("Be kind.", "system"), message("one")], metadata={"a": "b"})
    first = await create(stack, input="two", conversation=made.id)
    assert first["conversation"] == {"id": made.id}
    (session,) = {route.session for route in stack.router.routes}
    assert session == made.id, "its turns go to one worker"
    second = await create(stack, input="three", conversation={"id": made.id}, stream=False)
    last = prompts(stack)[-1]
    texts = ["Be kind.", "one", "two", first["output"][0]["content"][0]["text"], "three"]
    places = [last.index(text) for text in texts]
    assert places == sorted(places)
    items = [item async for item in conversations.items.list(made.id, order="asc")]
    assert [item.id for item in items[2:]] == [
        items[2].id,
        first["output"][0]["id"],
        items[4].id,
        second["output"][0]["id"],
    ]
    latest = await conversations.items.list(made.id, limit=2)
    assert [item.id for item in latest.data] == [items[5].id, items[4].id]
    assert latest.has_more

    added = await conversations.items.create(made.id, items=[message("four"), message("five")])
    assert [item.content[0].text for item in added.data] == ["four", "five"]  # type: ignore[union-attr]
    await conversations.items.delete(added.first_id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        await conversations.items.retrieve(added.first_id, conversation_id=made.id)
    stored = await conversations.items.retrieve(added.last_id, conversation_id=made.id)
    assert stored.content[0].text == "five"  # type: ignore[union-attr]
    changed = await conversations.update(made.id, metadata={"c": "d"})
    assert changed.metadata == {"c": "d"} == (await conversations.retrieve(made.id)).metadata
    listed = (await stack.http.get(CONVERSATIONS)).json()
    assert [one["id"] for one in listed["data"]] == [made.id]

    going_on = await post(stack, input="six", previous_response_id=second["id"])
    assert (going_on.status_code, going_on.json()["error"]["code"]) == (400, "response_in_conversation")
    assert (await conversations.delete(made.id)).deleted
    gone = await post(stack, input="six", conversation=made.id)
    assert (gone.status_code, gone.json()["error"]["param"]) == (404, "conversation")


async def test_concurrent_turns_of_a_conversation_lose_no_item(stack: GatewayStack) -> None:
    made = await stack.client.conversations.create()
    await asyncio.gather(*(create(stack, input=f"turn {number}", conversation=made.id) for number in range(8)))
    items = [item async for item in stack.client.conversations.items.list(made.id, limit=100)]
    assert len(items) == len({item.id for item in items}) == 16


async def test_conversations_are_their_tenants_own_and_share_its_bounds(server: RedisServer) -> None:
    settings = {"tenancy": True, "api_keys": json.dumps([entry("one", name="acme"), entry("two", name="other")])}
    bounds = {"responses_tenant_bytes": 3000}
    async with running_stack([Worker("w0")], redis_url=server.url, **settings, **bounds) as stack:
        mine, others = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("one", "two"))
        body = {"items": [message("x" * 500)]}
        made = [(await stack.http.post(CONVERSATIONS, json=body, **mine)).json()["id"] for _ in range(6)]
        actual = [(await stack.http.get(f"{CONVERSATIONS}/{name}", **mine)).status_code for name in made]
        assert actual == sorted(actual, reverse=True)
        assert (actual[0], actual[-1]) == (404, 200), "the oldest make room"
        for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/items"), ("GET", "/items/msg_1")):
            answer = await stack.http.request(method, f"{CONVERSATIONS}/{made[-1]}{path}", **others)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "conversation_not_found")
        assert (await stack.http.get(CONVERSATIONS, **others)).json()["data"] == []
        using = await post(stack, "two", conversation=made[-1])
        assert using.status_code == 404
        assert (await stack.http.get(f"{CONVERSATIONS}/{made[-1]}")).status_code == 401
        used = {key: int(size) for key, size in server.client.hgetall("rz:default:kept-sizes:acme").items()}
        assert used.pop(b"total") == sum(used.values()) <= 3000
        listed = (await stack.http.get(f"{CONVERSATIONS}?limit=1", **mine)).json()
        assert (listed["data"][0]["id"], listed["has_more"]) == (made[-1], True)


async def test_wrong_body_of_a_conversation_is_refused_by_field(stack: GatewayStack) -> None:
    for path, body, param in (
        ("", {"items": [message("a")] * 21}, "items"),
        ("", {"items": [{"type": "function_call", "call_id": "c"}]}, "items[0].name"),
        ("", {"items": [{"id": "msg_1"}]}, "items[0].type"),
        ("", {"metadata": {"a": 1}}, "metadata[...]"),
        ("/items", {"items": []}, "items"),
        ("/items", {}, "items"),
        ("/items", {"items": [{"type": "message", "role": "user"}]}, "items[0].content"),
        ("/", {}, "metadata"),
    ):
        made = await stack.client.conversations.create()
        address = f"{CONVERSATIONS}/{made.id}{path}" if path else CONVERSATIONS
        answer = await stack.http.post(address, json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


async def test_response_names_one_history(stack: GatewayStack) -> None:
    made, first = await stack.client.conversations.create(), await create(stack)
    both = await post(stack, conversation=made.id, previous_response_id=first["id"])
    assert (both.status_code, both.json()["error"]["param"]) == (400, "conversation")
    for name in ("conv_1", "resp_", "%2e"):
        assert (await post(stack, conversation=name)).status_code == 404
    counted = await stack.http.post(f"{PATH}/input_tokens", json={"input": "hi", "conversation": made.id})
    assert counted.json()["input_tokens"] > 0


async def test_compacted_conversation_goes_on_from_its_summary(stack: GatewayStack) -> None:
    items = [message("The word is Zebra."), message("Noted.", "assistant"), message("And now?")]
    limit = {"max_output_tokens": 20}
    compacted = await stack.client.responses.compact(model="", input=items, instructions="Be brief.", extra_body=limit)
    assert compacted.object == "response.compaction"
    assert compacted.usage.output_tokens > 0
    sent = prompts(stack)[-1]
    assert sent.index("Zebra") < sent.index("Summarize our conversation")
    assert "Be brief." in sent
    (item,) = [one.to_dict() for one in compacted.output]
    await create(stack, input=[item, message("Go on.")], store=False)
    going_on = prompts(stack)[-1]
    assert "Zebra" not in going_on
    assert going_on.index("Summarize our conversation") < going_on.index("Go on.")
    foreign = await post(stack, input=[item | {"encrypted_content": "gAAAA"}, message("Go on.")], store=False)
    assert foreign.headers["x-ryzanstein-ignored"] == "input[].type=compaction"
    whole = await create(stack, input=items)
    again = await stack.client.responses.compact(model="", previous_response_id=whole["id"], extra_body=limit)
    assert again.usage.output_tokens == 20


async def test_input_is_kept_as_a_turn_without_an_answer(stack: GatewayStack) -> None:
    first = await create(stack, input="The word is Zebra.", generate=False)
    assert (first["status"], first["output"], first["usage"]["output_tokens"]) == ("completed", [], 0)
    assert not stack.workers[0].submits
    await create(stack, input="Which?", previous_response_id=first["id"])
    assert "Zebra" in prompts(stack)[-1]
