"""The WebSocket of /v1/responses, with OpenAI's client: many responses, lanes, remembered turns, reconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import openai
import websockets
from openai.resources.responses.responses import AsyncResponsesConnection

from services.gateway.main import running_gateway
from tests.integration.gateway.fleet import CHAT_TEMPLATE, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_stack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_responses import PATH, create, prompts
from tests.integration.gateway.test_tenants import entry
from tests.unit.gateway.made_tokenizers import byte_level

OVER = ("response.completed", "response.incomplete", "response.failed", "error")


def client(url: str, key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


async def answer(connection: AsyncResponsesConnection, **fields: Any) -> list[Any]:
    """The events of a new response, to the last one."""
    await connection.response.create(**({"max_output_tokens": 3} | fields))
    return await until(connection, *OVER)


async def test_connection_makes_many_responses_as_post_does(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url) as stack, client(stack.url) as openai_client:
        whole = await create(stack, max_output_tokens=3)
        async with openai_client.responses.connect() as connection:
            events = await answer(connection, input="hi")
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert [events[0].type, events[1].type] == ["response.created", "response.in_progress"]
            last = events[-1].response
            assert last.store
            assert (await stack.client.responses.retrieve(last.id)).output == last.output
            second = (await answer(connection, input="more", previous_response_id=last.id))[-1].response
            assert second.usage.input_tokens > whole["usage"]["input_tokens"]
            assert last.output[0].content[0].text in prompts(stack)[-1]
        sample = stack.gateway.metrics.registry.get_sample_value
        labels = {"api": "websocket", "route": PATH, "status": "200", "model": "test-model"}
        assert sample("ryzanstein_gateway_requests_total", labels) == 2


async def test_first_event_of_a_response_names_the_ignored_parts_of_its_request() -> None:
    async with (
        running_stack([Worker("w0")], redis_url="unix:///nowhere") as stack,
        client(stack.url) as openai_client,
        openai_client.responses.connect() as connection,
    ):
        parts: dict[str, Any] = {"include": ["of.next_year"], "tools": [{"type": "x_search"}]}
        events = await answer(connection, input="one", store=False, stream_id="a", **parts)
        named = [event.to_dict().get("ignored") for event in events]
        assert named == ["include=of.next_year, tools[].type=x_search", *[None] * (len(events) - 1)]
        plain = await answer(connection, input="one", store=False)
        assert "ignored" not in plain[0].to_dict()


async def test_turns_that_are_not_stored_are_remembered_by_the_connection_alone() -> None:
    async with (
        running_stack([Worker("w0")], redis_url="unix:///nowhere") as stack,
        client(stack.url) as openai_client,
        openai_client.responses.connect() as connection,
    ):
        kept_input = (await answer(connection, input="The word is Zebra.", generate=False, store=False))[-1].response
        assert kept_input.output == []
        first = (await answer(connection, input="one", store=False, previous_response_id=kept_input.id))[-1].response
        second = await answer(connection, input="two", store=False, previous_response_id=first.id)
        assert second[-1].type == "response.incomplete"
        prompt = prompts(stack)[-1]
        places = [prompt.index(text) for text in ("Zebra", "one", first.output[0].content[0].text, "two")]
        assert places == sorted(places)
        async with openai_client.responses.connect() as other:
            (lost,) = await answer(other, input="three", previous_response_id=first.id, store=False)
            assert (lost.type, lost.status, lost.error.code) == ("error", 503, "store_unavailable")


async def test_stored_turn_after_one_that_is_not_stored_keeps_the_whole_conversation(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url) as stack, client(stack.url) as openai_client:
        async with openai_client.responses.connect() as connection:
            first = (await answer(connection, input="The word is Zebra.", store=False))[-1].response
            second = (await answer(connection, input="two", previous_response_id=first.id))[-1].response
        other = fast_settings(router_addresses=stack.router.address, redis_url=server.url)
        async with running_gateway(other) as gateway:
            await eventually(gateway.catalog.available)
            async with (
                client(f"http://127.0.0.1:{gateway.http.port}") as elsewhere,
                elsewhere.responses.connect() as connection,
            ):
                third = (await answer(connection, input="three", previous_response_id=second.id))[-1]
                assert third.type == "response.incomplete"
                assert "Zebra" in prompts(stack)[-1], "another gateway goes on from what is kept"
                (lost,) = await answer(connection, input="three", previous_response_id=first.id)
                assert (lost.status, lost.error.code) == (400, "previous_response_not_found")


async def test_lanes_run_at_the_same_time_and_each_in_order(server: RedisServer) -> None:
    steps = asyncio.Semaphore(0)
    worker = Worker("w0", steps=steps)
    async with (
        running_stack([worker], redis_url=server.url) as stack,
        client(stack.url) as openai_client,
        openai_client.responses.connect() as connection,
    ):
        for lane in ("a", "b", "a"):
            await connection.response.create(input=f"in {lane}", stream_id=lane, max_output_tokens=2)
        await eventually(lambda: len(worker.submits) == 2)
        for _ in range(20):
            steps.release()
        ended: list[str] = []
        begun: list[str] = []
        while len(ended) < 3:
            event = await connection.recv()
            assert event.stream_id
            if event.type == "response.created":
                begun.append(event.stream_id)
            elif event.type in OVER:
                ended.append(event.stream_id)
        assert sorted(begun[:2]) == ["a", "b"]
        assert begun[2] == "a"
        assert sorted(ended) == ["a", "a", "b"]


async def until(connection: AsyncResponsesConnection, *kinds: str) -> list[Any]:
    """Events up to the first one of these kinds."""
    events: list[Any] = []
    async with asyncio.timeout(120):
        while not events or events[-1].type not in kinds:
            events.append(await connection.recv())
    return events


class Stepping:
    """A connection whose worker takes a step for each release, and that alone remembers its turns."""

    def __init__(self, stack: GatewayStack, steps: asyncio.Semaphore, connection: AsyncResponsesConnection) -> None:
        self.stack, self.steps, self.connection = stack, steps, connection

    def release(self, n: int) -> None:
        for _ in range(n):
            self.steps.release()

    async def begin(self, **fields: Any) -> str:
        """Create a response, and return its id once it has its first token."""
        await self.connection.response.create(**({"input": "one", "max_output_tokens": 3, "store": False} | fields))
        self.release(1)
        return str((await until(self.connection, "response.created"))[-1].response.id)

    async def steer(self, response_id: str, value: Any) -> Any:
        """The event that answers a steer."""
        await self.connection.response.steer(previous_response_id=response_id, input=value)
        return (await until(self.connection, "response.steer.accepted", "response.steer.failed"))[-1]

    async def ended(self) -> Any:
        """The last event of a response."""
        return (await until(self.connection, *OVER))[-1]


@asynccontextmanager
async def stepping(**fields: Any) -> AsyncIterator[Stepping]:
    steps = asyncio.Semaphore(0)
    worker = Worker("w0", steps=steps, **fields)
    async with (
        running_stack([worker], redis_url="unix:///nowhere") as stack,
        client(stack.url) as openai_client,
        openai_client.responses.connect() as connection,
    ):
        yield Stepping(stack, steps, connection)


async def test_steers_are_the_input_of_a_successor_with_the_same_settings() -> None:
    async with stepping() as socket:
        first = await socket.begin(stream_id="a", instructions="Be brief.")
        part = {"type": "input_text", "text": "in red"}
        for value in ("and blue", [{"role": "user", "content": [part]}, {"role": "user", "content": "please"}]):
            accepted = await socket.steer(first, value)
            assert (accepted.type, accepted.stream_id) == ("response.steer.accepted", "a")
            assert (accepted.steer.previous_response_id, bool(accepted.steer.id)) == (first, True)
        socket.release(5)
        ended = await until(socket.connection, *OVER)
        begin = accepted.sequence_number + 1
        assert [event.sequence_number for event in ended] == list(range(begin, begin + len(ended)))
        second = await until(socket.connection, *OVER)
        assert [event.sequence_number for event in second] == list(range(len(second)))
        whole = second[-1].response
        assert (whole.previous_response_id, whole.instructions, whole.max_output_tokens) == (first, "Be brief.", 3)
        assert {event.stream_id for event in second} == {"a"}
        prompt = prompts(socket.stack)[-1]
        places = [prompt.index(text) for text in ("one", "and blue", "in red", "please")]
        assert places == sorted(places)
        late = await socket.steer(first, "late")
        assert (late.error.code, late.steer.input) == ("response_already_completed", "late")
        await socket.begin(max_output_tokens=1, previous_response_id=whole.id)
        assert (await socket.ended()).response.previous_response_id == whole.id, "no further successor"


async def test_steer_waits_for_the_outputs_of_calls() -> None:
    ids = byte_level().encode('<tool_call>{"name": "f", "arguments": {}}</tool_call>').ids
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    template = "{% if tools %}<tool_call>{% endif %}" + CHAT_TEMPLATE
    fields: dict[str, Any] = {"token": lambda prompt, seed, position: ids[position], "template": template}
    async with stepping(**fields, end_at=len(ids)) as socket:
        first = await socket.begin(tools=tools, max_output_tokens=100)
        accepted = await socket.steer(first, "in red")
        socket.release(len(ids))
        (call,) = (await socket.ended()).response.output
        pending = await socket.connection.recv()
        assert (pending.type, pending.steer.id) == ("response.steer.pending", accepted.steer.id)
        assert pending.reason == "waiting_for_required_input"
        (required,) = [each.to_dict() for each in pending.required_input]
        assert required == {"type": "function_call_output", "call_id": call.call_id, "name": "f"}
        output = {**required, "output": "an answer"}
        await socket.begin(previous_response_id=first, input=[output], tools=tools, max_output_tokens=1)
        assert (await socket.ended()).response.max_output_tokens == 1, "it has settings of its own"
        prompt = prompts(socket.stack)[-1]
        assert prompt.index("one") < prompt.index("in red") < prompt.index("an answer")


WRONG_STEERS: list[Any] = [
    "",
    [],
    7,
    [{"role": "system", "content": "a"}],
    [{"role": "user", "content": "a", "id": "msg_1"}],
    [{"type": "function_call_output", "call_id": "c", "output": "a"}],
    [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}],
]


async def test_wrong_steer_returns_its_input_and_changes_no_response() -> None:
    async with stepping() as socket:
        unknown = await socket.steer("resp_other", "a")
        assert (unknown.error.code, unknown.sequence_number) == ("response_not_found", 0)
        first = await socket.begin()
        for value in WRONG_STEERS:
            failed = await socket.steer(first, value)
            assert (failed.type, failed.error.code) == ("response.steer.failed", "invalid_input"), value
            assert failed.to_dict(warnings=False)["steer"] == {"previous_response_id": first, "input": value}
        queued = [await socket.steer(first, "a") for _ in range(33)]
        assert [event.type for event in queued[:-1]] == ["response.steer.accepted"] * 32
        assert queued[-1].error.code == "too_many_pending_steers"
    async with stepping() as socket:
        unsteered = await socket.begin(context_management=[{"type": "compaction"}])
        assert (await socket.steer(unsteered, "a")).error.code == "steering_not_supported"


async def test_steer_is_returned_when_its_response_fails_or_has_no_successor() -> None:
    image = "data:image/png;base64,iVBORw0KGgo="
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": image}]}]
    for faults, value, end in (([Fault("mistake", 1)], "a", "response.failed"), ([], picture, "response.incomplete")):
        async with stepping(faults=faults) as socket:
            accepted = await socket.steer(await socket.begin(), value)
            socket.release(3)
            assert (await socket.ended()).type == end
            returned = (await until(socket.connection, "response.steer.failed"))[-1]
            assert (returned.steer.id, returned.error.code) == (accepted.steer.id, "successor_creation_failed")
            assert returned.to_dict(warnings=False)["steer"]["input"] == value


WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"type": "response.cancel", "input": "a"}, "type"),
    ({"type": "response.steer", "input": "a"}, "previous_response_id"),
    ({"type": "response.steer", "previous_response_id": "resp_1"}, "input"),
    ({"type": "response.create", "input": "a", "previous_response_id": [[]] * 2}, "previous_response_id"),
    ({"type": "response.create", "input": "a", "background": True}, "background"),
    ({"type": "response.create", "input": "a", "stream_id": ""}, "stream_id"),
    ({"type": "response.create", "input": "a", "temperature": -1}, "temperature"),
]


async def test_wrong_message_ends_no_connection() -> None:
    async with (
        running_stack([Worker("w0")], redis_url="unix:///nowhere") as stack,
        websockets.connect(f"ws{stack.url[4:]}{PATH}", proxy=None) as socket,
    ):
        for message, param in [("no JSON", "type"), *((json.dumps(wrong), param) for wrong, param in WRONG_MESSAGES)]:
            await socket.send(message)
            refused = json.loads(await socket.recv())
            assert (refused["type"], refused["status"], refused["error"]["param"]) == ("error", 400, param)
        good = {"type": "response.create", "input": "a", "store": False, "max_output_tokens": 1, "stream": True}
        await socket.send(json.dumps(good))
        assert json.loads(await socket.recv())["type"] == "response.created"


async def test_connection_needs_a_key_and_survives_a_failed_response(server: RedisServer) -> None:
    settings = {"tenancy": True, "api_keys": json.dumps([entry("one", name="acme")])}
    worker = Worker("w0", faults=[Fault("mistake", 1)])
    async with running_stack([worker], redis_url=server.url, **settings) as stack:
        async with client(stack.url, "two") as foreign, foreign.responses.connect() as connection:
            (refused,) = await answer(connection, input="a")
            assert refused.status == 401
        async with client(stack.url, "one") as mine, mine.responses.connect() as connection:
            assert (await answer(connection, input="a"))[-1].type == "response.failed"
            assert (await answer(connection, input="a"))[-1].type == "response.incomplete"


async def test_ending_gateway_closes_the_connection_after_its_last_response() -> None:
    steps = asyncio.Semaphore(0)
    worker = Worker("w0", steps=steps)
    async with (
        running_stack([worker], redis_url="unix:///nowhere", drain_timeout_s=60.0) as stack,
        websockets.connect(f"ws{stack.url[4:]}{PATH}", proxy=None) as socket,
    ):
        body = {"type": "response.create", "input": "a", "store": False, "max_output_tokens": 2}
        await socket.send(json.dumps(body))
        await eventually(lambda: bool(worker.submits))
        ending = asyncio.create_task(stack.gateway.end(60.0))
        for _ in range(4):
            steps.release()
        events: list[str] = []
        with suppress(websockets.ConnectionClosed):
            while True:
                events.append(json.loads(await socket.recv())["type"])
        assert events[-1] == "response.incomplete"
        assert socket.close_code == 1012
        await ending


async def test_abandoned_connection_stops_its_generation() -> None:
    worker = Worker("w0", step_s=0.01)
    async with running_stack([worker], redis_url="unix:///nowhere") as stack:
        async with websockets.connect(f"ws{stack.url[4:]}{PATH}", proxy=None) as socket:
            body = {"type": "response.create", "input": "a", "store": False, "max_output_tokens": 200}
            await socket.send(json.dumps(body))
            await socket.recv()
        sample = stack.gateway.metrics.registry.get_sample_value
        labels = {"api": "websocket", "route": PATH}
        await eventually(lambda: sample("ryzanstein_gateway_in_flight_requests", labels) == 0)
