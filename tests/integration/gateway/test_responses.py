"""/v1/responses on scripted workers and a real Redis: memory, owners, limits, lifetimes, streams that move."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from services.gateway.api.ignored import IGNORED_HEADER
from services.gateway.http.responses import store
from services.gateway.main import running_gateway
from tests.integration.gateway import fleet
from tests.integration.gateway.fleet import Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_stack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_chat_prompts import text_of
from tests.integration.gateway.test_tenants import entry

PATH = "/v1/responses"
UNKNOWN = f"resp_{'0' * 48}"


@pytest.fixture
async def stack(server: RedisServer) -> AsyncIterator[GatewayStack]:
    async with running_stack([Worker("w0"), Worker("w1")], redis_url=server.url) as running:
        yield running


async def create(stack: GatewayStack, key: str = "", **fields: Any) -> dict[str, Any]:
    answer = await post(stack, key, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def post(stack: GatewayStack, key: str = "", **fields: Any) -> httpx.Response:
    body = {"input": "hi", "max_output_tokens": 2, "seed": 1, **fields}
    return await stack.http.post(PATH, json=body, headers={"authorization": f"Bearer {key or None}"})


def prompts(stack: GatewayStack) -> list[str]:
    """The prompt that the last request's worker got, by time."""
    submits = [submit for worker in stack.workers for submit in worker.submits]
    return [text_of(list(submit.prompt_ids)) for submit in submits]


def events_of(text: str) -> list[dict[str, Any]]:
    lines = "\n".join(line for line in text.split("\n") if not line.startswith(":"))
    frames = [frame.split("\n") for frame in lines.strip().split("\n\n")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in frames]
    assert [frame[0] for frame in frames] == [f"event: {event['type']}" for event in events]
    return events


async def test_turn_continues_stored_turns_as_if_their_items_were_sent(stack: GatewayStack) -> None:
    first = await create(stack, instructions="Be brief.", input="one")
    second = await create(stack, input=[{"role": "user", "content": "two"}], previous_response_id=first["id"])
    remembered = prompts(stack)
    reference = {"type": "item_reference", "id": second["output"][0]["id"]}
    items: list[Any] = ["one", *first["output"], "two", reference, "three"]
    sent = [{"role": "user", "content": item} if isinstance(item, str) else item for item in items]
    await create(stack, input=sent, store=False)
    await create(stack, input="three", previous_response_id=second["id"])
    by_items, by_memory = [text for text in prompts(stack) if text not in remembered][:1], prompts(stack)
    assert by_memory.count(by_items[0]) == 2
    assert sum("Be brief." in text for text in by_memory) == 1, "instructions are of one turn"
    sessions = [route.session for route in stack.router.routes]
    assert sessions[0] == sessions[1] == sessions[3] != ""
    assert sessions[2] == ""
    listed = await stack.client.responses.input_items.list(second["id"], order="asc")
    assert [item.content[0].text for item in listed.data] == ["two"]  # type: ignore[union-attr]
    elsewhere = await stack.http.get(f"{PATH}/{second['id']}/input_items?after=msg_1")
    assert (elsewhere.status_code, elsewhere.json()["error"]["param"]) == (400, "after")
    spoken = [{"role": "assistant", "content": [{"type": "refusal", "refusal": "I may not."}]}, *sent[-1:]]
    await create(stack, input=spoken, store=False)
    assert "I may not." in prompts(stack)[-1]
    assert (await stack.client.responses.retrieve(second["id"])).to_dict() == second


async def test_a_stream_is_the_whole_response_in_pieces_also_when_its_worker_dies(stack: GatewayStack) -> None:
    ask = {"max_output_tokens": 30, "store": False, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = await create(stack, **ask)
    for worker in stack.workers:
        worker.faults = [Fault("break", 7)]
    events = events_of((await post(stack, **ask, stream=True)).text)
    assert any(not worker.faults for worker in stack.workers)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"].removeprefix("response.") for event in events]
    beginning = ["created", "in_progress", "output_item.added", "content_part.added"]
    ending = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    deltas = len(kinds) - len(beginning) - len(ending)
    assert kinds == [*beginning, *["output_text.delta"] * deltas, *ending]
    (item,) = whole["output"]
    written = [event for event in events if event["type"].endswith(".delta")]
    assert "".join(event["delta"] for event in written) == item["content"][0]["text"]
    assert [entry for event in written for entry in event["logprobs"]] == item["content"][0]["logprobs"]
    last = events[-1]["response"]
    unlike = ("id", "created_at", "output", "usage")
    assert {k: v for k, v in last.items() if k not in unlike} == {k: v for k, v in whole.items() if k not in unlike}
    assert last["output"] == [item | {"id": last["output"][0]["id"]}]
    assert last["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_a_stream_that_cannot_go_on_fails_as_a_response(server: RedisServer, stack: GatewayStack) -> None:
    stack.router.empty = True
    assert (await post(stack, stream=True)).status_code == 503
    faults = [Fault("break", index) for index in range(5, 20)]
    async with running_stack([Worker("w0", faults=faults)], redis_url=server.url, sse_heartbeat_s=0.1) as beating:
        broken = events_of((await post(beating, max_output_tokens=30, stream=True)).text)
        assert broken[-1]["type"] == "response.failed"
        failed = broken[-1]["response"]
        assert (failed["status"], failed["store"], failed["error"]["code"]) == ("failed", False, "server_error")
        beating.workers[0].faults, beating.workers[0].step_s = [Fault("refuse", 0)], 0.3
        (never_begun,) = events_of((await post(beating, stream=True)).text)
        assert (never_begun["type"], never_begun["code"]) == ("error", "context_length_exceeded")
    assert not server.client.keys("rz:*:kept:*")


async def test_deep_conversations_have_an_end_and_truncation_drops_their_oldest_turns(
    stack: GatewayStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "MAX_CHAIN", 40)
    previous, texts = None, [f"turn {index}" for index in range(41)]
    for text in texts[:40]:
        ask = {"input": text, "previous_response_id": previous, "instructions": "Hold on.", "truncation": "auto"}
        previous = (await create(stack, **ask))["id"]
    last = max((text for text in prompts(stack) if texts[39] in text), key=len)
    assert "Hold on." in last
    stored = [text for text in texts if f"{text}<" in last]
    assert stored == texts[40 - len(stored) : 40], "the newest, without a gap"
    assert 5 < len(stored) < 40
    deep = await post(stack, input=texts[40], previous_response_id=previous, truncation="auto")
    assert (deep.status_code, deep.json()["error"]["code"]) == (400, "conversation_too_long")
    too_long = await post(stack, input="words " * 400, truncation="auto")
    assert (too_long.status_code, too_long.json()["error"]["param"]) == (400, "input")
    assert too_long.json()["error"]["code"] == "context_length_exceeded"


async def test_only_the_owner_sees_a_response(server: RedisServer) -> None:
    entries = [entry("one", name="acme"), entry("two", name="other")]
    settings = {"tenancy": True, "api_keys": json.dumps(entries)}
    async with running_stack([Worker("w0")], redis_url=server.url, **settings) as stack:
        made = await create(stack, "one")
        response_id, item_id = made["id"], made["output"][0]["id"]
        assert (await post(stack)).status_code == 401
        assert (await stack.http.get(f"{PATH}/{response_id}")).status_code == 401
        foreign = {"headers": {"authorization": "Bearer two"}}
        for name in (response_id, UNKNOWN, "resp_", f"resp_{response_id}", "x" * 250, "acme:1", "%2e%2e", "resp_*"):
            for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
                answer = await stack.http.request(method, f"{PATH}/{name}{path}", **foreign)
                assert answer.status_code == 404, (method, name, answer.text)
            going_on = await post(stack, "two", previous_response_id=name)
            assert (going_on.status_code, going_on.json()["error"]["code"]) == (400, "previous_response_not_found")
        referring = await post(stack, "two", input=[{"type": "item_reference", "id": item_id}])
        assert (referring.status_code, referring.json()["error"]["code"]) == (400, "item_not_found")
        own = {"headers": {"authorization": "Bearer one"}}
        assert (await stack.http.get(f"{PATH}/{response_id}", **own)).json() == made
        deleted = await stack.http.delete(f"{PATH}/{response_id}", **own)
        assert deleted.json() == {"id": response_id, "object": "response", "deleted": True}
        assert (await stack.http.get(f"{PATH}/{response_id}", **own)).status_code == 404
    assert not server.client.keys("rz:*:kept:*")


async def test_a_conversation_lives_on_by_use_and_ends_with_its_lifetime(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url, responses_ttl_s=50) as stack:
        first = await create(stack)
        key = f"rz:default:kept:-:{first['id']}"
        server.client.pexpire(key, 20_000)
        second = await create(stack, previous_response_id=first["id"])
        assert 45_000 < server.client.pttl(key) <= 50_000, "its next turn keeps it"
        settings = fast_settings(router_addresses=stack.router.address, redis_url=server.url, responses_ttl_s=50)
        async with running_gateway(settings) as other, httpx.AsyncClient(trust_env=False, timeout=60) as http:
            await eventually(other.catalog.available)
            url = f"http://127.0.0.1:{other.http.port}{PATH}"
            body = {"input": "hi", "max_output_tokens": 2, "previous_response_id": second["id"]}
            assert (await http.post(url, json=body)).status_code == 200, "any gateway goes on"
            assert (await http.get(f"{url}/{second['id']}")).json() == second
        server.client.delete(key)
        lost = await post(stack, previous_response_id=second["id"])
        assert (lost.status_code, lost.json()["error"]["param"]) == (400, "previous_response_id")
        assert first["id"] in lost.json()["error"]["message"]
        assert (await stack.http.get(f"{PATH}/{second['id']}")).status_code == 200
        # Expired entries no longer count: the index forgets them at the next write.
        server.client.zadd("rz:default:kept-index:-", {first["id"]: 1})
        await create(stack)
        members = server.client.zrange("rz:default:kept-index:-", 0, -1)
        sizes = {key: int(size) for key, size in server.client.hgetall("rz:default:kept-sizes:-").items()}
        total = sizes.pop(b"total")
        assert set(members) == set(sizes)
        assert len(members) == 3
        assert total == sum(sizes.values())
        server.client.set(f"rz:default:kept:-:{second['id']}", b'{"of": "another version"}')
        assert (await stack.http.get(f"{PATH}/{second['id']}")).status_code == 404
        assert (await post(stack, previous_response_id=second["id"])).status_code == 400


async def test_stored_responses_are_bounded_in_size(server: RedisServer) -> None:
    bounds = {"responses_max_bytes": 4000, "responses_tenant_bytes": 7000}
    async with running_stack([Worker("w0")], redis_url=server.url, **bounds) as stack:
        made = [await create(stack) for _ in range(6)]
        actual = [(await stack.http.get(f"{PATH}/{response['id']}")).status_code for response in made]
        assert actual == sorted(actual, reverse=True)
        assert actual[0] == 404, "the oldest make room"
        assert actual[-1] == 200
        large = {"metadata": {str(index): "x" * 500 for index in range(10)}}
        assert (await create(stack, **large))["store"] is False
        refused = await post(stack, **large, store=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_too_large")
        # Workers' leases are in the same Redis: it is never filled.
        stored = await create(stack, store=True)
        used = server.client.info("memory")["used_memory"]
        server.client.config_set("maxmemory", int(used / 0.7))
        for _ in range(20):
            await create(stack, metadata={"a": "x" * 500})
        assert server.client.info("memory")["used_memory"] < used / 0.7
        server.client.config_set("maxmemory", used)
        while (await create(stack))["store"]:
            pass
        full = await post(stack, store=True)
        assert (full.status_code, full.json()["error"]["code"]) == (503, "store_full")
        assert (await stack.http.get(f"{PATH}/{stored['id']}")).status_code == 404
        assert server.client.zcard("rz:default:kept-index:-") == 0


async def test_explicit_store_fails_and_other_responses_stay_unstored_when_redis_is_down(
    server: RedisServer,
) -> None:
    async with running_stack([Worker("w0", step_s=0.03)], redis_url=server.url) as stack:
        made = await create(stack)
        stream = {"max_output_tokens": 20, "stream": True}
        async with stack.client.responses.stream(model="", input="hi", store=True, max_output_tokens=60) as events:
            async for event in events:
                if event.type == "response.output_text.delta" and server.process.poll() is None:
                    server.process.kill()
                    server.process.wait()
        assert event.type == "response.failed"
        assert event.response.error is not None
        assert event.response.output[0].content[0].text  # type: ignore[union-attr]
        assert (await create(stack, store=False))["store"] is False
        assert (await create(stack))["store"] is False, "the answer says that it is not kept"
        assert events_of((await post(stack, **stream)).text)[-1]["response"]["store"] is False
        for needs in ({"store": True}, {"previous_response_id": made["id"]}):
            refused = await post(stack, **needs)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
            assert "retry-after" in refused.headers
        away = await stack.http.get(f"{PATH}/{made['id']}")
        assert (away.status_code, away.headers["retry-after"]) == (503, "2")
        await eventually(lambda: not stack.gateway.metrics.registry.get_sample_value("ryzanstein_gateway_redis_up"))


async def test_stored_turn_returns_its_input_items_unchanged(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet, "MAX_LEN", 2048)
    image = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}
    given = [
        {"type": "additional_tools", "role": "developer", "tools": [{"type": "function", "name": "look"}]},
        {"type": "message", "role": "user", "content": [image, {"type": "input_text", "text": "Look."}]},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "a"}},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": {"at": "a.png"}},
        {"type": "function_call_output", "call_id": "c1", "output": [image]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Thanks."}]},
    ]
    async with running_stack([Worker("w0")], redis_url=server.url) as stack:
        first = await post(stack, input=given)
        left_out = ["type=web_search_call", "content[].type=input_image", "output[].type=input_image"]
        assert first.headers[IGNORED_HEADER].split(", ") == [f"input[].{name}" for name in left_out]
        listed = (await stack.http.get(f"{PATH}/{first.json()['id']}/input_items?order=asc")).json()["data"]
        assert [{name: item[name] for name in like} for item, like in zip(listed, given, strict=True)] == given
        assert len({item["id"] for item in listed}) == len(given)
        second = await post(stack, input="More?", previous_response_id=first.json()["id"])
        assert second.headers[IGNORED_HEADER] == first.headers[IGNORED_HEADER]
        assert '{"name": "look"' in prompts(stack)[-1], "tools of earlier turns are offered"


REQUIRED = (  # by Open Responses
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
)  # fmt: skip


async def test_a_response_has_the_fields_that_its_standard_requires(stack: GatewayStack) -> None:
    ask = {"store": False, "presence_penalty": 0.5}
    whole = await create(stack, **ask)
    events = events_of((await post(stack, **ask, stream=True)).text)
    for response in (whole, *(event["response"] for event in events if "response" in event)):
        assert not set(REQUIRED) - response.keys()
        assert (response["presence_penalty"], response["frequency_penalty"]) == (0.5, 0.0)


async def test_responses_are_not_stored_when_their_ttl_is_zero(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url, responses_ttl_s=0) as stack:
        assert (await create(stack))["store"] is False
        for field, value in (("store", True), ("previous_response_id", UNKNOWN)):
            refused = await post(stack, **{field: value})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
    assert not server.client.keys("rz:*:kept*")


IMAGE = [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}]
FUNCTION = {"type": "function", "name": "f"}
ASKED = {"role": "user", "content": "a"}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "function"}]}, "tools[0].name", "Missing"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "match"),
    ({"tools": [FUNCTION, FUNCTION]}, "tools", "two functions"),
    ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
    ({"tools": [FUNCTION], "tool_choice": "some"}, "tool_choice", "`required`"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "teleport"}}, "tool_choice", "hosted tool"),
    ({"tools": [FUNCTION], "tool_choice": {"type": 1}}, "tool_choice.type", "`function`"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "among"),
    ({"tools": [FUNCTION], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "g"}]}},
     "tool_choice.tools", "among"),
    ({"input": []}, "input", "empty"),
    ({"input": None}, "input", "Missing"),
    ({"input": [{"type": "web_search_call"}]}, "input", "empty"),
    ({"input": [{"type": "compaction_trigger"}]}, "input[0].type", "`function_call_output`"),
    ({"input": [{"type": "configuration_update", "reasoning": {"effort": "low"}}]}, "input[0].type", "`message`"),
    ({"input": [{"type": "additional_tools", "tools": "f"}]}, "input[0].tools", "list"),
    ({"input": [{"id": "a"}, {"type": "additional_tools", "tools": [FUNCTION, {"type": "custom"}]}]}, "input", "`a`"),
    ({"input": [ASKED, {"type": "additional_tools", "tools": [FUNCTION, {"type": "custom"}]}]},
     "input[1].tools[1].name", "Missing"),
    ({"input": [{"type": []}]}, "input[0].type", "`message`"),
    ({"input": [{"role": "user", "content": IMAGE}]}, "input[0].content[1].type", "the vision of multimodal"),
    ({"input": [{"role": "user", "content": IMAGE}, {"role": "user", "content": "What is it?"}]},
     "input[0].content[1].type", "the vision of multimodal"),
    ({"input": [{"role": "developer", "content": IMAGE}, {"role": "assistant", "content": "a"}]},
     "input[0].content[1].type", "the vision of multimodal"),
    ({"input": [{"role": "user"}]}, "input[0].content", "Missing"),
    ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "robot"),
    ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input", "`x`"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "msg_1"),
    ({"input": [{"id": "msg_1"}]}, "input", "msg_1"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "Missing"),
    ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "words"}}}}, "text.format.schema",
     "words"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type", "xml"),
    ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
    ({"max_output_tokens": 1000}, "input", "maximum context"),
    ({"metadata": {"a": "x" * 513}}, "metadata[...]", "512"),
    ({"background": True}, "background", "`store` may not be false"),
    ({"conversation": "conv_1", "previous_response_id": UNKNOWN}, "conversation", "one of them"),
    ({"conversation": 7}, "conversation", "expected"),
    ({"prompt": {"id": "p"}}, "prompt", "only `null`"),
    ({"truncation": "some"}, "truncation", "some"),
]  # fmt: skip


async def test_wrong_bodies_are_refused_by_field() -> None:
    async with running_stack([Worker("w0")], redis_url="unix:///nowhere") as stack:
        for fields, param, words in WRONG:
            answer = await post(stack, **({"store": False} | fields))
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), (fields, error)
            assert words in error["message"], (fields, error)
        nested = '{"a":' * 3000 + "1" + "}" * 3000
        tools = f'[{{"name": "f", "parameters": {nested}}}]'
        body = f'{{"input": "a", "store": false, "max_output_tokens": 1, "tools": {tools}}}'
        answer = await stack.http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400)
        assert (await stack.http.put(PATH)).status_code == 405
        page = f"{PATH}/{UNKNOWN}/input_items"
        for query in ("limit=0", "limit=x", "limit=101", "order=up"):
            assert (await stack.http.get(f"{page}?{query}")).status_code == 400
        assert (await stack.http.get(f"{PATH}/{UNKNOWN}?stream=true&starting_after=x")).status_code == 400
        foreign = {"origin": "https://elsewhere.example"}
        assert (await stack.http.delete(f"{PATH}/{UNKNOWN}", headers=foreign)).status_code == 403
