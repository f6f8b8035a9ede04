"""Responses in the background: polled, cancelled, streamed again, and made by another gateway where one has ended."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.gateway.http.responses import queue
from services.gateway.main import running_gateway
from tests.integration.gateway.fleet import Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_stack
from tests.integration.gateway.placing import running_fleet
from tests.integration.gateway.process import GatewayProcess, gateway_process
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_responses import PATH, create, events_of, post
from tests.integration.gateway.test_tenants import entry

LATER = {"background": True, "max_output_tokens": 30}
OVER = ("completed", "incomplete", "failed", "cancelled")


@pytest.fixture
async def stack(server: RedisServer) -> AsyncIterator[GatewayStack]:
    async with running_stack([Worker("w0")], redis_url=server.url) as running:
        yield running


async def over(http: httpx.AsyncClient, response_id: str, url: str = "") -> dict[str, Any]:
    """The response when it has ended."""
    async with asyncio.timeout(120):
        while True:
            response = (await http.get(f"{url}{PATH}/{response_id}")).json()
            if response["status"] in OVER:
                return dict(response)
            await asyncio.sleep(0.05)


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


async def test_response_is_made_in_the_background_as_in_the_foreground(stack: GatewayStack) -> None:
    ask = {"max_output_tokens": 30, "input": "hello", "metadata": {"a": "b"}}
    now = await create(stack, **ask)
    queued = await create(stack, **ask, background=True)
    assert (queued["status"], queued["background"], queued["output"], queued["store"]) == ("queued", True, [], True)
    done = await over(stack.http, queued["id"])
    assert text_of(done) == text_of(now)
    unlike = ("id", "created_at", "background", "output", "usage")
    assert {k: v for k, v in done.items() if k not in unlike} == {k: v for k, v in now.items() if k not in unlike}
    assert (done["id"], done["created_at"]) == (queued["id"], queued["created_at"])
    assert done["usage"]["total_tokens"] == now["usage"]["total_tokens"]
    going_on = await create(stack, previous_response_id=done["id"])
    assert going_on["usage"]["input_tokens"] > now["usage"]["total_tokens"]
    again = await stack.http.post(f"{PATH}/{done['id']}/cancel")
    assert (again.status_code, again.json()["error"]["code"]) == (400, "response_not_cancellable")


async def test_stream_goes_on_after_any_of_its_events_and_without_its_client(server: RedisServer) -> None:
    steps = asyncio.Semaphore(0)
    async with running_stack([Worker("w0", steps=steps)], redis_url=server.url) as stack:
        body = {"input": "hi", "seed": 1, **LATER, "stream": True}
        async with stack.http.stream("POST", PATH, json=body) as answer:
            lines = answer.aiter_lines()
            first = json.loads([await anext(lines), await anext(lines)][1].removeprefix("data: "))
        assert first["type"] == "response.created"
        response_id = first["response"]["id"]
        early = await post(stack, previous_response_id=response_id)
        assert (early.status_code, early.json()["error"]["code"]) == (400, "previous_response_not_complete")
        for _ in range(40):
            steps.release()
        done = await over(stack.http, response_id)
        whole = events_of((await stack.http.get(f"{PATH}/{response_id}?stream=true")).text)
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert whole[0] == first
        assert whole[-1]["response"] == done
        assert "".join(event["delta"] for event in whole if event["type"].endswith(".delta")) == text_of(done)
        for after in (0, 3, len(whole) - 2):
            rest = await stack.http.get(f"{PATH}/{response_id}?stream=true&starting_after={after}")
            assert events_of(rest.text) == whole[after + 1 :]
        wrong = await stack.http.get(f"{PATH}/{response_id}?stream=true&starting_after=x")
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "starting_after")
        other = await create(stack, background=True)
        refused = await stack.http.get(f"{PATH}/{other['id']}?stream=true")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "response_not_streamable")


async def test_cancelled_response_stops_its_generation_and_stays_cancelled(server: RedisServer) -> None:
    steps = asyncio.Semaphore(0)
    worker = Worker("w0", steps=steps)
    async with running_stack([worker], redis_url=server.url) as stack:
        made = await create(stack, **LATER, stream=False)
        await eventually(lambda: bool(worker.submits))
        for _ in range(2):
            cancelled = (await stack.http.post(f"{PATH}/{made['id']}/cancel")).json()
            assert (cancelled["id"], cancelled["status"]) == (made["id"], "cancelled")
        await eventually(
            lambda: (
                stack.gateway.metrics.registry.get_sample_value(
                    "ryzanstein_gateway_in_flight_requests", {"api": "background", "route": PATH}
                )
                == 0
            )
        )
        for _ in range(40):
            steps.release()
        assert (await over(stack.http, made["id"]))["status"] == "cancelled"
        worker.steps = asyncio.Semaphore(0)
        streamed = asyncio.create_task(post(stack, **LATER, stream=True))
        await eventually(lambda: len(worker.submits) == 2)
        (open_one,) = [one for one in (await stack.http.get(PATH)).json()["data"] if one["id"] != made["id"]]
        await stack.http.post(f"{PATH}/{open_one['id']}/cancel")
        last = events_of((await streamed).text)[-1]
        assert (last["type"], last["response"]["status"]) == ("response.cancelled", "cancelled")
        assert (await stack.http.delete(f"{PATH}/{made['id']}")).status_code == 200
        assert (await stack.http.post(f"{PATH}/{made['id']}/cancel")).status_code == 404
    assert not server.client.zcard("rz:default:kept-queue")


async def test_failed_request_ends_as_a_failed_response(server: RedisServer) -> None:
    worker = Worker("w0", faults=[Fault("mistake", 3)])
    async with running_stack([worker], redis_url=server.url) as stack:
        made = await create(stack, **LATER)
        failed = await over(stack.http, made["id"])
        assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
        worker.faults = [Fault("mistake", 3)]
        events = events_of((await post(stack, **LATER, stream=True)).text)
        assert (events[-1]["type"], events[-1]["response"]["status"]) == ("response.failed", "failed")
        # A job that is gone ends its response: it never stays `in_progress`.
        steps = worker.steps = asyncio.Semaphore(0)
        lost = await create(stack, **LATER)
        server.client.zrem("rz:default:kept-queue", f"-:{lost['id']}")
        server.client.delete(f"rz:default:kept-job:-:{lost['id']}")
        assert (await over(stack.http, lost["id"]))["error"]["type"] == "background_lost"
        for _ in range(40):
            steps.release()


async def test_request_that_cannot_be_made_is_refused_at_once(stack: GatewayStack) -> None:
    for fields, param in (
        ({"store": False}, "background"),
        ({"generate": False}, "generate"),
        ({"max_output_tokens": 10_000}, "input"),
        ({"model": "nope"}, "model"),
    ):
        answer = await post(stack, **(LATER | fields))
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["param"] == param
        assert not (await stack.http.get(PATH)).json()["data"]


async def test_background_is_refused_without_places(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url, responses_background=0) as stack:
        answer = await post(stack, **LATER)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")


async def test_follower_of_a_stream_leaves_its_place_to_the_job(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "_MOST_OPEN", 1)
    settings = {"tenancy": True, "api_keys": json.dumps([entry("one", name="acme", max_concurrent=1)])}
    steps = asyncio.Semaphore(0)
    worker = Worker("w0", steps=steps)
    async with running_stack([worker], redis_url=server.url, **settings) as stack:
        following = asyncio.create_task(post(stack, "one", **LATER, stream=True))
        await eventually(lambda: bool(worker.submits))
        full = await post(stack, "one", **LATER)
        assert full.status_code == 429
        for _ in range(40):
            steps.release()
        events = events_of((await following).text)
        assert events[-1]["type"] == "response.incomplete"


@asynccontextmanager
async def two_gateways(folder: Path, redis_url: str, worker: Worker) -> AsyncIterator[list[GatewayProcess]]:
    async with (
        running_fleet([worker]) as router,
        gateway_process(router.address, folder / "a.log", REDIS_URL=redis_url) as one,
        gateway_process(router.address, folder / "b.log", REDIS_URL=redis_url) as other,
    ):
        yield [one, other]


@pytest.mark.timeout(300)
async def test_killed_gateways_responses_are_made_by_another_one(tmp_path: Path, server: RedisServer) -> None:
    steps = asyncio.Semaphore(8)
    worker = Worker("w0", steps=steps)
    async with two_gateways(tmp_path, server.url, worker) as gateways, httpx.AsyncClient(timeout=120) as http:
        body = {"input": "hi", **LATER, "stream": True}
        url = gateways[0].url
        async with http.stream("POST", url + PATH, json=body) as answer:
            lines = answer.aiter_lines()
            seen = [json.loads((await anext(lines)).removeprefix("data: ")) for _ in range(2) if await anext(lines)]
        response_id = seen[0]["response"]["id"]
        await eventually(lambda: published(server, response_id) > 4)
        owner = server.client.hget("rz:default:kept-owners", f"-:{response_id}").decode()
        victim, survivor = gateways if owner_of(gateways[0], owner) else gateways[::-1]
        before = [json.loads(event) for event in server.client.lrange(events_key(response_id), 0, -1)]
        victim.process.kill()
        server.client.zadd("rz:default:kept-queue", {f"-:{response_id}": 1})  # as if the lease were over
        for _ in range(100):
            steps.release()
        done = await over(http, response_id, survivor.url)
        assert done["status"] == "incomplete"
        whole = events_of((await http.get(f"{survivor.url}{PATH}/{response_id}?stream=true")).text)
        assert whole[: len(before)] == before, "clients have read them"
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        assert "".join(event["delta"] for event in whole if event["type"].endswith(".delta")) == text_of(done)
        assert whole[-1]["response"] == done


def events_key(response_id: str) -> str:
    return f"rz:default:kept:-:{response_id}:events"


def published(server: RedisServer, response_id: str) -> int:
    return int(server.client.llen(events_key(response_id)))


def owner_of(gateway: GatewayProcess, owner: str) -> bool:
    """Whether a gateway owns the job: only its process has made the response so far."""
    with httpx.Client(timeout=60) as http:
        text = http.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics").text
    return f'ryzanstein_gateway_in_flight_requests{{api="background",route="{PATH}"}} 1.0' in text


async def test_ending_gateway_hands_its_responses_on(server: RedisServer) -> None:
    steps = asyncio.Semaphore(0)
    worker = Worker("w0", steps=steps)
    async with running_stack([worker], redis_url=server.url, drain_timeout_s=0.1) as stack:
        made = await create(stack, **LATER)
        await eventually(lambda: bool(worker.submits))
        other = fast_settings(router_addresses=stack.router.address, redis_url=server.url)
        await stack.gateway.leave()
        ending = asyncio.create_task(stack.gateway.end(0.1))
        async with running_gateway(other) as second, httpx.AsyncClient(timeout=60) as http:
            await ending
            for _ in range(200):
                steps.release()
            done = await over(http, made["id"], f"http://127.0.0.1:{second.http.port}")
            assert done["status"] == "incomplete"
