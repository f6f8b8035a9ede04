"""A model that should be there is waited for in every API, and is never said not to exist."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import worker_pb2

from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually
from tests.integration.gateway.test_inference_grpc import inference
from tests.integration.gateway.test_stream_socket import SocketClient, connect

if TYPE_CHECKING:
    from ryzanstein.v1.inference_pb2_grpc import InferenceAsyncStub as Stub

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 3}


@pytest.fixture
async def waiting() -> AsyncIterator[tuple[GatewayStack, Stub]]:
    """No worker yet, and routers that let requests wait for half a minute."""
    async with expecting(MODEL, "other") as (stack, stub):
        yield stack, stub
        await asyncio.gather(*(worker.stop() for worker in stack.workers))


@asynccontextmanager
async def expecting(*models: str, **options: Any) -> AsyncIterator[tuple[GatewayStack, Stub]]:
    """A gateway whose router expects these models."""
    workers = [Worker(f"of-{name}", model=name) for name in options.get("fallback_model", "").split()]
    async with inference(workers, **options) as (stack, stub):
        stack.router.queue_s, stack.router.expected = 30, [*models]
        await eventually(lambda: all(map(stack.gateway.catalog.expects, models)))
        yield stack, stub


async def join(stack: GatewayStack, worker: Worker) -> None:
    await worker.start()
    stack.workers.append(worker)
    stack.router.workers.append(worker)


async def test_every_api_waits_for_the_first_worker(waiting: tuple[GatewayStack, Stub]) -> None:
    stack, stub = waiting
    options = pb.GenerationOptions(max_tokens=3)
    async with connect(stack) as socket:
        client = SocketClient(socket)
        await client.start("a", 3, model=MODEL)
        await client.start("b", 3, model="other")
        await client.send(type="cancel", id="b")
        assert (await client.receive())["finish_reason"] == "cancelled", "who waits holds up nothing else"
        calls = [
            asyncio.create_task(call)
            for call in (
                stack.http.post("/v1/completions", json=BODY),
                stack.http.post("/v1/embeddings", json={"model": MODEL, "input": "a"}),
                stack.http.post("/tokenize", json={"model": MODEL, "prompt": "a"}),
            )
        ]
        stream = stub.Generate(pb.GenerateRequest(model=MODEL, prompt="a", options=options))
        answers = asyncio.create_task(anext(aiter(stream)))
        await eventually(lambda: stack.router.queued >= 5)
        await join(stack, Worker("w0"))
        assert [answer.status_code for answer in await asyncio.gather(*calls)] == [200, 200, 200]
        assert (await answers).ids
        assert (await client.until("done", "a"))["finish_reason"] == "length"


async def test_expired_wait_returns_503_with_retry_after(waiting: tuple[GatewayStack, Stub]) -> None:
    stack, stub = waiting
    stack.router.queue_s = 0.2
    for path, body in (("/v1/completions", BODY), ("/v1/embeddings", {"model": MODEL, "input": "a"})):
        refused = await stack.http.post(path, json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert MODEL in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "no_workers"
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await anext(aiter(stub.Generate(pb.GenerateRequest(model=MODEL, prompt="a"))))
    assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [round(route.patience_ms / 1000) for route in stack.router.routes] == [60, 60, 300], "a stream waits longer"


async def test_a_model_at_zero_is_waited_for_and_listed(waiting: tuple[GatewayStack, Stub]) -> None:
    stack, stub = waiting
    assert [model["id"] for model in (await stack.http.get("/v1/models")).json()["data"]] == ["other", MODEL]
    assert (await stack.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
    worker = Worker("w0")
    await join(stack, worker)
    await eventually(lambda: stack.gateway.catalog.available())
    stack.router.hidden = {"w0"}
    await eventually(lambda: not stack.gateway.catalog.available())
    request = asyncio.create_task(stack.http.post("/v1/completions", json=BODY))
    await eventually(lambda: stack.router.queued)
    stack.router.hidden = set()
    assert (await request).status_code == 200
    stack.router.hidden = {"w0"}
    await eventually(lambda: not stack.gateway.catalog.available())
    listed = (await stack.http.get("/v1/models")).json()["data"]
    assert [(model["id"], "max_model_len" in model) for model in listed] == [("other", False), (MODEL, True)]
    assert [model.id for model in (await stub.ListModels(pb.ListModelsRequest())).models] == ["other", MODEL]
    assert (await stack.http.get("/health")).status_code == 503
    unknown = await stack.http.post("/v1/completions", json=BODY | {"model": "nope"})
    assert unknown.status_code == 404
    assert "`other`" in unknown.json()["error"]["message"]


async def test_model_that_a_router_expects_is_known_to_gateways() -> None:
    async with inference([]) as (stack, _):
        stack.router.queue_s, stack.router.expected = 0.1, [MODEL, "other"]

        async def status() -> int:
            return (await stack.http.post("/v1/completions", json=BODY)).status_code

        def listed() -> set[str]:
            return set(stack.gateway.catalog.listed())

        await join(stack, Worker("w0", model="other"))
        await eventually(lambda: stack.gateway.catalog.available())
        assert await status() == 503
        await join(stack, Worker("w1"))
        stack.router.queue_s = 30
        assert await status() == 200
        stack.router.expected, stack.router.hidden = ["other"], {"w1"}
        await eventually(lambda: listed() == {"other"} and not stack.gateway.catalog.knows(MODEL))
        assert await status() == 404
        await asyncio.gather(*(worker.stop() for worker in stack.workers))


async def test_a_model_is_waited_for_from_its_first_worker_s_start() -> None:
    """As soon as routers list the worker, which loads."""
    other = Worker("w0", model="other")
    async with inference([other]) as (stack, stub):
        assert (await stack.http.post("/v1/completions", json=BODY)).status_code == 404
        worker = Worker("w1", loading=True)
        await join(stack, worker)
        await eventually(lambda: set(stack.gateway.catalog.listed()) == {"other", MODEL})
        stack.router.queue_s = 0.1
        refused = await stack.http.post("/v1/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["code"] == "no_workers"
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await anext(aiter(stub.Generate(pb.GenerateRequest(model=MODEL, prompt="a"))))
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await stack.http.get(f"/v1/models/{MODEL}")).json()["id"] == MODEL
        stack.router.queue_s = 30
        waiting = asyncio.create_task(stack.http.post("/v1/completions", json=BODY))
        await eventually(lambda: stack.router.queued)
        worker.loading = False
        assert (await waiting).status_code == 200
        await worker.stop()


async def test_the_fallback_model_answers_after_the_wait() -> None:
    """Not at once: the autoscaler counts waiting requests."""
    async with expecting(MODEL, fallback_model="other") as (stack, _):
        stack.router.queue_s = 0.3
        message = {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "a"}]}
        for path, body in (("/v1/completions", BODY), ("/v1/messages", message)):
            answer = await stack.http.post(path, json=body)
            assert (answer.status_code, answer.json()["model"]) == (200, "other")
            assert answer.headers["x-ryzanstein-fallback-model"] == "other"
        assert stack.router.routes[0].model == MODEL
        assert not stack.router.routes[0].HasField("patience_ms"), "not as long as for a start"


async def test_the_only_expected_model_needs_no_name_and_a_worker_that_is_of_no_use_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with expecting(MODEL) as (stack, _):
        sent = asyncio.create_task(stack.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}))
        await eventually(lambda: stack.router.queued)
        worker = Worker("w0", abilities=worker_pb2.ModelCard(tokenizer_json=b"{}"))
        await join(stack, worker)
        refused = await sent
        assert refused.status_code == 503
        assert refused.json()["error"]["message"] == f"The first worker of the model `{MODEL}` cannot be used yet."
        assert any("w0" in record.getMessage() for record in caplog.records)
        worker.abilities = None
        await eventually(lambda: stack.gateway.catalog.available())
        assert (await stack.http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3})).status_code == 200
        await worker.stop()


async def test_model_of_sleeping_workers_is_known_by_a_card_and_listed_with_a_phase(
    waiting: tuple[GatewayStack, Stub],
) -> None:
    stack, _ = waiting
    stack.router.phases = {"w0": worker_pb2.PHASE_SLEEPING, "w1": worker_pb2.PHASE_LOADING}

    async def phases() -> dict[str, str | None]:
        await stack.gateway.catalog.refresh()
        listed = (await stack.http.get("/v1/models")).json()["data"]
        return {model["id"]: model.get("phase") for model in listed if "max_model_len" in model or not model["created"]}

    await join(stack, Worker("w0"))
    await join(stack, Worker("w1"))
    await eventually(lambda: stack.gateway.catalog.knows(MODEL))
    assert await phases() == {"other": None, MODEL: "sleeping"}
    stack.router.phases["w1"] = worker_pb2.PHASE_WAKING
    assert await phases() == {"other": None, MODEL: "waking"}
    assert (await stack.http.get(f"/v1/models/{MODEL}")).json()["phase"] == "waking"
    del stack.router.phases["w1"]
    assert await phases() == {"other": None, MODEL: "serving"}
