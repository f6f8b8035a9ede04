"""A gateway that gets SIGTERM fails no client: real processes, real signals, all APIs open at once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import grpc.aio
import httpx
import pytest
import websockets
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

from services.common.rpc import open_channel
from services.gateway.drain import Drain, DrainPhase
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import eventually, running_stack
from tests.integration.gateway.placing import running_fleet
from tests.integration.gateway.process import GatewayProcess, gateway_process
from tests.integration.gateway.test_bad_clients import post, raw, rest_of
from tests.integration.gateway.test_stream_socket import PROMPT, SocketClient, expected_ids

TOKENS = 100
BODY = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": 0, "return_token_ids": True}
REQUEST = pb.GenerateRequest(prompt=PROMPT, options=pb.GenerationOptions(max_tokens=TOKENS, seed=0))


@dataclass
class OpenStreams:
    """A stream of every API, and a plain request; each is at its beginning."""

    plain: asyncio.Task[httpx.Response]
    events: asyncio.Task[list[str]]
    socket: SocketClient
    call: asyncio.Task[list[int]]


@asynccontextmanager
async def draining(
    folder: Path, worker: Worker, **environment: str
) -> AsyncIterator[tuple[GatewayProcess, OpenStreams]]:
    """A gateway with one request open in each API."""
    async with (
        running_fleet([worker]) as router,
        gateway_process(router.address, folder / "gateway.log", **environment) as gateway,
        httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=120) as http,
        websockets.connect(gateway.url.replace("http", "ws") + "/v1/stream", proxy=None) as socket,
        open_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):

        async def events() -> list[str]:
            async with http.stream("POST", "/v1/completions", json=BODY | {"stream": True}) as response:
                return [line.removeprefix("data: ") async for line in response.aiter_lines() if line]

        async def call() -> list[int]:
            stub = inference_pb2_grpc.InferenceStub(channel)
            return [token async for response in stub.Generate(REQUEST) for token in response.ids]

        client = SocketClient(socket)
        await client.start("a", TOKENS)
        tasks = [asyncio.create_task(work) for work in (http.post("/v1/completions", json=BODY), events(), call())]
        await eventually(lambda: len(worker.submits) == 4)
        await client.until("token")
        try:
            yield gateway, OpenStreams(tasks[0], tasks[1], client, tasks[2])
        finally:
            await asyncio.gather(*tasks, return_exceptions=True)


async def status(port: int, path: str) -> int:
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        return (await client.get(f"http://127.0.0.1:{port}{path}")).status_code


async def closing_code(client: SocketClient) -> int | None:
    with pytest.raises(websockets.ConnectionClosed) as closed:
        await client.receive()
    return closed.value.rcvd.code if closed.value.rcvd else None


async def refuses_connections(port: int) -> None:
    async with asyncio.timeout(60):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionRefusedError:
                return
            except ConnectionResetError:  # it came while the listener was being closed
                continue
            writer.close()
            await asyncio.sleep(0.02)


async def test_draining_gateway_finishes_open_requests_and_answers_late_requests(tmp_path: Path) -> None:
    worker = Worker("w0", step_s=0.3)  # so slow that all four are open until the test has looked at everything
    environment = {"DRAIN_DELAY_S": "3", "DRAIN_TIMEOUT_S": "60"}
    async with draining(tmp_path, worker, **environment) as (gateway, opened):
        limits = httpx.Limits(max_connections=1)
        async with (
            httpx.AsyncClient(base_url=gateway.url, trust_env=False, limits=limits, timeout=60) as idle,
            httpx.AsyncClient(base_url=gateway.url, trust_env=False, limits=limits, timeout=60) as silent,
        ):
            assert (await idle.get("/livez")).headers.get("connection") != "close"
            await silent.get("/livez")
            gateway.process.send_signal(signal.SIGTERM)
            signalled = monotonic()
            while await status(gateway.port, "/readyz") != 503:  # noqa: ASYNC110  # it is another process's
                await asyncio.sleep(0.01)
            assert await status(gateway.metrics_port, "/readyz") == 503
            assert await status(gateway.port, "/livez") == 200
            late = await idle.post("/v1/completions", json=BODY | {"max_tokens": 1})
            assert (late.status_code, late.headers["connection"]) == (200, "close"), "served, and sent elsewhere"
            new = await idle.post("/v1/completions", json=BODY | {"max_tokens": 1})
            assert new.status_code == 200, "clients that have not heard of it may still come"
            await refuses_connections(gateway.port)
            assert monotonic() - signalled > 2.9
            last = await silent.post("/v1/completions", json=BODY | {"max_tokens": 1})
            assert (last.status_code, last.headers["connection"]) == (200, "close"), "over a connection that was open"
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            metrics = (await client.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics")).text
        assert "ryzanstein_gateway_drain_remaining_streams 4.0" in metrics
        worker.step_s = 0.0
        await opened.socket.start("b", 1)
        assert (await opened.socket.until("error", "b"))["error"]["code"] == "shutting_down"

        assert (await opened.plain).json()["choices"][0]["token_ids"] == expected_ids(0, TOKENS)
        events = await opened.events
        assert events[-1] == "[DONE]"
        ids = [token for event in events[:-1] for token in json.loads(event)["choices"][0]["token_ids"]]
        assert ids == expected_ids(0, TOKENS)
        assert await opened.call == expected_ids(0, TOKENS)
        assert (await opened.socket.until("done"))["finish_reason"] == "length"
        assert opened.socket.ids["a"] == expected_ids(0, TOKENS)
        assert await closing_code(opened.socket) == 1012
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0


async def test_a_gateway_listens_until_balancers_have_stopped_sending(tmp_path: Path) -> None:
    """On a busy machine they hear late that it is not ready; probes and scrapes are no sign of it."""
    environment = {"DRAIN_DELAY_S": "0.2", "DRAIN_SILENCE_S": "4", "DRAIN_TIMEOUT_S": "60"}
    worker = Worker("w0", step_s=0.2)  # so slow that all four are open until the test has looked at everything
    async with draining(tmp_path, worker, **environment) as (gateway, opened):
        gateway.process.send_signal(signal.SIGTERM)
        signalled = monotonic()
        while await status(gateway.port, "/readyz") != 503:  # noqa: ASYNC110  # it is another process's
            await asyncio.sleep(0.01)
        drains = monotonic()
        while monotonic() - drains < 5:  # a request comes within each four seconds of it
            sent_at = monotonic()
            async with httpx.AsyncClient(trust_env=False, timeout=60) as balancer:  # a connection of its own for each
                answer = await balancer.post(f"{gateway.url}/v1/completions", json=BODY | {"max_tokens": 1})
            assert answer.status_code == 200
            await asyncio.sleep(0.2)
        probing = asyncio.create_task(_probe(gateway.port))
        await refuses_connections(gateway.port)
        ended = monotonic()
        assert ended - sent_at > 3.9
        await probing
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
            metrics = (await client.get(f"http://127.0.0.1:{gateway.metrics_port}/metrics")).text
        (late,) = re.findall(r"^ryzanstein_gateway_drain_last_request_seconds (.*)$", metrics, re.MULTILINE)
        assert sent_at - drains <= float(late) <= ended - signalled, "since it drains, which was between the two"
        worker.step_s = 0.0
        assert (await opened.plain).status_code == 200
        assert (await opened.events)[-1] == "[DONE]"
        await opened.socket.until("done")
        assert await closing_code(opened.socket) == 1012
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
    assert [line for line in gateway.log() if line["message"].startswith("it stops listening, ")]


async def _probe(port: int) -> None:
    """As kubelets and Prometheus do, until it listens no more."""
    with contextlib.suppress(httpx.TransportError):
        while True:
            assert [await status(port, path) for path in ("/readyz", "/livez", "/metrics")] == [503, 200, 200]
            await asyncio.sleep(0.1)


async def test_endless_requests_do_not_extend_draining_past_its_limit() -> None:
    drain, loop = Drain(), asyncio.get_running_loop()
    drain.arrive()
    drain.enter(DrainPhase.DRAINING)
    assert drain.last_arrival_s == 0, "what came before is not late"
    began = loop.time()
    waiting = asyncio.create_task(drain.silence(60, 0.5))
    while not waiting.done():
        drain.arrive()
        await asyncio.sleep(0.02)
    assert 0.5 <= loop.time() - began < 60


async def test_drain_deadline_sends_an_error_to_every_open_stream(tmp_path: Path) -> None:
    worker = Worker("w0", step_s=0.5)
    async with draining(tmp_path, worker, DRAIN_TIMEOUT_S="3") as (gateway, opened):
        signalled = monotonic()
        gateway.process.send_signal(signal.SIGTERM)
        plain = await opened.plain
        assert (plain.status_code, plain.headers["retry-after"]) == (503, "1")
        assert plain.json()["error"]["code"] == "shutting_down"
        *_, error, done = await opened.events
        assert done == "[DONE]"
        assert json.loads(error)["error"] == plain.json()["error"]
        assert (await opened.socket.until("error"))["error"] == plain.json()["error"]
        assert await closing_code(opened.socket) == 1012
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await opened.call
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "shutting down" in (failed.value.details() or "")
        assert dict(failed.value.trailing_metadata() or ())["retry-after"] == "1"
        assert 2.8 < monotonic() - signalled < 12, "side by side, not one after the other"
        assert await asyncio.wait_for(gateway.process.wait(), 60) == 0
    assert [line for line in gateway.log() if line["level"] == "error"] == []


async def test_silent_connection_stays_open_until_its_first_request() -> None:
    """Proxies open connections for later: closing one after the time for a head loses the request sent just then."""
    async with running_stack([Worker("w0")], header_timeout_s=0.2, keep_alive_s=4.0) as stack:
        waiting, silent, dribbling = await raw(stack, b""), await raw(stack, b""), await raw(stack, b"\r\n")
        assert await rest_of(dribbling) == b"", "an empty line begins a head"
        await asyncio.sleep(0.4)
        await asyncio.get_running_loop().sock_sendall(waiting, post({"prompt": "a", "max_tokens": 1}))
        assert (await asyncio.get_running_loop().sock_recv(waiting, 15)) == b"HTTP/1.1 200 OK"
        assert await rest_of(silent) == b"", "idle for too long"
        waiting.close()


async def test_a_grpc_connection_is_given_up_at_its_age_and_its_calls_go_on(tmp_path: Path) -> None:
    worker, states = Worker("w0", step_s=0.03), []
    async with (
        running_fleet([worker]) as router,
        gateway_process(router.address, tmp_path / "log", GRPC_MAX_CONNECTION_AGE_S="1") as gateway,
        open_channel(f"127.0.0.1:{gateway.grpc_port}") as channel,
    ):

        async def follow() -> None:
            state = channel.get_state(try_to_connect=True)
            while True:
                states.append(state)
                await channel.wait_for_state_change(state)
                state = channel.get_state()

        following = asyncio.create_task(follow())
        stub = inference_pb2_grpc.InferenceStub(channel)
        ids = [token async for response in stub.Generate(REQUEST) for token in response.ids]
        assert ids == expected_ids(0, TOKENS), "three seconds, three times the age"
        assert grpc.ChannelConnectivity.IDLE in states, "the next call would connect anew"
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following
