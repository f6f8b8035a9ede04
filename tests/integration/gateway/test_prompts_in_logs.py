"""Prompts stay out of the logs, at every log level and in every API, until a setting asks for them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc.aio
import httpx
import websockets
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc

from services.common.rpc import open_channel
from tests.integration.gateway.fleet import Fault, Worker
from tests.integration.gateway.placing import running_fleet
from tests.integration.gateway.process import GatewayProcess, gateway_process

SECRET = "xylophone"


@asynccontextmanager
async def logging_gateway(folder: Path, **environment: str) -> AsyncIterator[GatewayProcess]:
    workers = [Worker("w0", faults=[Fault("break", 2)]), Worker("w1")]
    async with (
        running_fleet(workers) as router,
        gateway_process(router.address, folder / "gateway.log", **environment) as gateway,
    ):
        yield gateway


async def say_the_secret_everywhere(gateway: GatewayProcess) -> None:
    """In good requests, in refused ones, and in one whose worker dies."""
    chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, timeout=60) as client:
        for path, body in (
            ("/v1/completions", {"prompt": SECRET, "max_tokens": 4}),
            ("/v1/completions", {"prompt": SECRET, "max_tokens": 4}),
            ("/v1/completions", {"prompt": SECRET, "max_tokens": 100_000}),
            ("/v1/completions", {"prompt": SECRET * 400}),
            ("/v1/completions", {"prompt": {SECRET: 1}}),
            ("/v1/completions", {"prompt": "a", SECRET: SECRET}),
            ("/v1/chat/completions", chat),
            ("/v1/embeddings", {"input": SECRET}),
            ("/tokenize", {"prompt": SECRET}),
        ):
            assert (await client.post(path, json=body)).status_code in (200, 400)
        assert (await client.post("/v1/completions", content=f'{{"prompt": "{SECRET}')).status_code == 400
    async with websockets.connect(gateway.url.replace("http", "ws") + "/v1/stream", proxy=None) as socket:
        await socket.send(json.dumps({"type": "start", "id": "a", "kind": "chat", "request": chat}))
        while json.loads(await socket.recv())["type"] != "done":
            pass
        await socket.send(f'{{"{SECRET}": 1')
        await socket.recv()
    async with open_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = pb.GenerationOptions(max_tokens=4)
        assert [r async for r in stub.Generate(pb.GenerateRequest(prompt=SECRET, options=options))]
        with suppress(grpc.aio.AioRpcError):
            await anext(aiter(stub.Generate(pb.GenerateRequest(prompt=SECRET, model=SECRET))))


async def test_prompts_are_in_no_log_at_the_lowest_level(tmp_path: Path) -> None:
    async with logging_gateway(tmp_path, LOG_LEVEL="debug") as gateway:
        await say_the_secret_everywhere(gateway)
    written = gateway.output.read_text()
    assert "interrupted on w0" in written, "the log is there, and the worker died"
    assert SECRET not in written


async def test_a_setting_lets_every_api_log_its_prompts(tmp_path: Path) -> None:
    async with logging_gateway(tmp_path, LOG_PROMPTS="true") as gateway:
        await say_the_secret_everywhere(gateway)
    prompts = [line["prompt"] for line in gateway.log() if line["message"] == "prompt"]
    assert prompts.count(SECRET) == 4, "two completions, an embedding, a call by gRPC"
    conversation = f"<|im_start|>user\n{SECRET}<|im_end|>\n<|im_start|>assistant\n"
    assert prompts.count(conversation) == 2, "REST and WebSocket"
