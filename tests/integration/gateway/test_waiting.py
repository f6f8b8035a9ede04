"""Requests for a model that is not there yet wait for it, hear how far its start is, and are all served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio
import httpx
import openai
import pytest
import redis.asyncio as redis
import websockets
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc, routing_pb2, worker_pb2

from services.common.keys import RedisKeys
from services.common.ports import free_port
from services.common.rpc import open_channel
from services.gateway.main import Gateway, running_gateway
from services.gateway.upstream.patience import StartPatience
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings
from tests.integration.gateway.test_stream_socket import SocketClient
from tests.integration.router.conftest import router_client
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import KillableRedis, Service, router_process

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 2}
STREAM = BODY | {"stream": True}
LOADING, SERVING, SLEEPING = worker_pb2.PHASE_LOADING, worker_pb2.PHASE_SERVING, worker_pb2.PHASE_SLEEPING


class StartingWorker(FakeWorker):
    """A worker with a lease, states and answers."""

    def __init__(self, worker_id: str, model: str) -> None:
        super().__init__(worker_id, model)
        self.answering = Worker(worker_id, model)
        self.answering.incarnation = self.incarnation

    async def GetModelCard(self, request: Any, context: Any) -> worker_pb2.ModelCard:  # noqa: N802
        return await self.answering.GetModelCard(request, context)

    async def Connect(self, request_iterator: Any, context: Any) -> AsyncIterator[worker_pb2.StepOutputs]:  # noqa: N802
        async for outputs in self.answering.Connect(request_iterator, context):
            yield outputs

    @property
    def prompts(self) -> list[int]:
        """The lengths of prompts, in the order in which they came."""
        return [len(submit.prompt_ids) for submit in self.answering.submits]


class ColdInstallation:
    """Redis, a router process, and a gateway that has the model's card from an earlier worker."""

    def __init__(self, server: KillableRedis, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack
        self._port = str(free_port())
        self._client = redis.from_url(server.url)
        stack.push_async_callback(self._client.aclose)
        self._metrics_port = str(free_port())
        self.router: Service
        self.gateway: Gateway
        self.http: httpx.AsyncClient

    def start_router(self) -> None:
        self.router = router_process(
            self._server.url_of("router"),
            ROUTER_PORT=self._port,
            METRICS_PORT=self._metrics_port,
            QUEUE_TIMEOUT_S="0.2",
        )
        self._stack.callback(self.router.end)

    async def start_gateway(self) -> None:
        self.grpc_port = free_port()
        settings = fast_settings(
            router_addresses=self.router.address, redis_url=self._server.url_of("gateway"), grpc_port=self.grpc_port
        )
        self.gateway = await self._stack.enter_async_context(running_gateway(settings))
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{self.gateway.http.port}", trust_env=False, timeout=120,
                limits=httpx.Limits(max_connections=None),
            )
        )  # fmt: skip

    async def begin(self) -> None:
        self.start_router()
        await self.start_gateway()
        first = await self.worker("first")
        await eventually(lambda: self.gateway.catalog.available())
        await first.stop()
        await eventually(lambda: not self.gateway.catalog.available())

    async def worker(self, worker_id: str, phase: worker_pb2.Phase = SERVING, model: str = MODEL) -> StartingWorker:
        worker = StartingWorker(worker_id, model)
        worker.update(phase=phase)
        await worker.start(self._client, RedisKeys("default"))
        self._stack.push_async_callback(worker.stop)
        return worker

    async def held(self, count: int) -> None:
        """Return once the router says that it holds so many requests."""
        line = f'ryzanstein_router_held_requests{{model="{MODEL}"}} {count}.0'
        async with asyncio.timeout(120):
            while line not in (await self.http.get(f"http://127.0.0.1:{self._metrics_port}/metrics")).text:  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    def ask(self, **body: Any) -> asyncio.Task[httpx.Response]:
        return asyncio.create_task(self.http.post("/v1/completions", json=BODY | body))


@pytest.fixture
async def cold(redis_server: KillableRedis) -> AsyncIterator[ColdInstallation]:
    async with AsyncExitStack() as stack:
        installation = ColdInstallation(redis_server, stack)
        await installation.begin()
        yield installation


async def test_plain_and_streamed_requests_wait_for_a_cold_model_and_all_are_served(cold: ColdInstallation) -> None:
    worker = await cold.worker("w", LOADING)
    await eventually(lambda: cold.gateway.catalog.phase(MODEL) == "loading")
    plain, begun = [cold.ask() for _ in range(10)], list[str]()

    async def stream() -> list[str]:
        async with cold.http.stream("POST", "/v1/completions", json=STREAM) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            async for line in lines:  # on a busy machine another comment may come first
                if line.startswith(": waiting loading"):
                    begun.append(line)
                    break
            return [line async for line in lines if line]

    streams = [asyncio.create_task(stream()) for _ in range(10)]
    await cold.held(20)
    await eventually(lambda: len(begun) == len(streams))
    worker.update(phase=SERVING)
    for answer in await asyncio.gather(*plain):
        assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 2)
    for lines in await asyncio.gather(*streams):
        assert lines[-1] == "data: [DONE]"
        assert not [line for line in lines if '"error"' in line]
    assert len(worker.prompts) == 20


async def test_thousand_requests_wait_for_a_cold_model_and_none_is_lost(cold: ColdInstallation) -> None:
    async with router_client([cold.router.address], route_timeout_s=5.0) as client:
        until = asyncio.get_running_loop().time() + 600
        waits = [
            client.route(routing_pb2.RouteRequest(request_id=str(number), model=MODEL), StartPatience(until=until))
            for number in range(1000)
        ]
        waiting = asyncio.gather(*waits)
        await cold.held(1000)
        await cold.worker("w")
        assert {assignment.ref.worker_id for assignment in await waiting} == {"w"}


async def test_requests_wait_on_while_their_router_is_killed_and_starts_again(cold: ColdInstallation) -> None:
    waiting = []
    for number in range(1, 4):
        waiting.append(cold.ask(prompt="a" * number, stream=number % 2 == 0))
        await cold.held(number)
    cold.router.kill()
    cold.start_router()
    await cold.held(3)
    worker = await cold.worker("w")
    answers = await asyncio.gather(*waiting)
    assert [answer.status_code for answer in answers] == [200] * 3
    assert not [answer.text for answer in answers if '"error"' in answer.text]
    assert worker.prompts == [1, 2, 3], "each has its place again"


async def test_gateway_and_router_that_start_at_zero_know_the_model_by_its_card(cold: ColdInstallation) -> None:
    """Though no list names it, and another model has a worker."""
    cold.router.kill()
    cold.start_router()
    await cold.worker("other", model="other")
    await cold.start_gateway()
    await eventually(lambda: cold.gateway.catalog.knows(MODEL) and cold.gateway.catalog.knows("other"))
    listed = {model["id"]: model for model in (await cold.http.get("/v1/models")).json()["data"]}
    assert listed[MODEL]["max_model_len"] == 256
    waiting = cold.ask()
    await cold.held(1)
    await cold.worker("w")
    assert (await waiting).status_code == 200
    assert (await cold.http.post("/v1/completions", json=BODY | {"model": "typo"})).status_code == 404


async def test_wait_beyond_the_patience_of_a_request_is_503_with_the_estimate_of_the_start(
    cold: ColdInstallation,
) -> None:
    async def refused(patience: str = "0.3", **body: Any) -> httpx.Response:
        headers = {"x-ryzanstein-patience": patience}
        return await cold.http.post("/v1/completions", json=BODY | body, headers=headers)

    answer = await refused()
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1"), "no start has been measured"
    assert answer.json()["error"]["code"] == "no_workers"
    worker = await cold.worker("w", SLEEPING)
    worker.update(wake_ms=20_000)
    worker.cannot_wake = "needs 2 GiB"
    answer = await refused()
    while answer.headers["retry-after"] == "1":  # the router has not seen the worker yet
        answer = await refused()
    assert answer.status_code == 503
    assert 15 <= int(answer.headers["retry-after"]) <= 20, "what is left of 20 s"
    streamed = await refused("3", stream=True)  # the router says each quarter of a second how far the start is
    assert streamed.status_code == 200, "a comment was sent first"
    *comments, error, done = [line for line in streamed.text.splitlines() if line]
    lefts = [int(comment.removeprefix(": waiting sleeping ").removesuffix("s")) for comment in comments]
    assert 15 <= lefts[0] <= 20
    assert (lefts, done) == (sorted(lefts, reverse=True), "data: [DONE]")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "no_workers"


async def test_wrong_header_of_the_wait_is_refused(stack: GatewayStack) -> None:
    for headers, words in (
        ({"x-ryzanstein-patience": "long"}, "must be a number of seconds from 0 to 900, got 'long'"),
        ({"x-ryzanstein-patience": "-1"}, "from 0 to 900"),
        ({"x-ryzanstein-patience": "1e9"}, "from 0 to 900"),
        ({"x-ryzanstein-patience": "nan"}, "from 0 to 900"),
        ({"x-ryzanstein-events": "progress"}, "may name `waiting`, got 'progress'"),
    ):
        answer = await stack.http.post("/v1/completions", json=STREAM, headers=headers)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == next(iter(headers))


async def test_every_api_says_how_far_the_start_is(cold: ColdInstallation) -> None:
    """Streams by comments, and by events where their clients want them."""
    worker = await cold.worker("w", LOADING)
    await eventually(lambda: cold.gateway.catalog.phase(MODEL) == "loading")
    events = {"x-ryzanstein-events": "waiting"}
    eventful = asyncio.create_task(cold.http.post("/v1/completions", json=STREAM, headers=events))
    async with (
        openai.AsyncOpenAI(base_url=f"{cold.http.base_url}/v1", api_key="unused", max_retries=0) as client,
        websockets.connect(f"ws://127.0.0.1:{cold.gateway.http.port}/v1/stream", proxy=None) as socket,
        open_channel(f"127.0.0.1:{cold.grpc_port}") as channel,
    ):
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = inference_pb2.GenerateRequest(
            model=MODEL, prompt="a", options=inference_pb2.GenerationOptions(max_tokens=2)
        )
        call = aiter(stub.Generate(request, metadata=grpc.aio.Metadata(*events.items())))
        stream = asyncio.create_task(client.completions.create(**STREAM))  # type: ignore[call-overload]
        talker = SocketClient(socket)
        await talker.send(type="start", id="a", kind="completion", request=BODY, events=["waiting"])
        message = await talker.until("waiting")
        assert (message["id"], message["stage"], message["estimate_s"]) == ("a", "loading", None)
        await talker.send(type="start", id="b", kind="completion", request=BODY, patience=0.1)
        assert (await talker.until("error", "b"))["error"]["code"] == "no_workers"
        hasty = stub.Generate(request, metadata=grpc.aio.Metadata(("x-ryzanstein-patience", "0.1")))
        assert await hasty.code() is grpc.StatusCode.UNAVAILABLE
        waiting = await anext(call)
        assert (waiting.waiting.stage, waiting.text) == ("loading", "")
        chunks = await stream  # the answer has begun
        worker.update(phase=SERVING)
        assert "".join([chunk.choices[0].text async for chunk in chunks])
        assert (await talker.until("done"))["finish_reason"] == "length"
        assert [message.finish_reason async for message in call if message.ids][-1] == "length"
    text = (await eventful).text
    event, data = text.splitlines()[:2]
    assert event == "event: ryzanstein.waiting"
    assert json.loads(data.removeprefix("data: ")) == {"stage": "loading", "estimate_s": None}
    assert text.endswith("data: [DONE]\n\n")


async def test_gone_client_waits_no_longer(cold: ColdInstallation) -> None:
    plain, streamed = cold.ask(), cold.ask(stream=True)
    await cold.held(2)
    for waiting in (plain, streamed):
        waiting.cancel()
    await cold.held(0)
