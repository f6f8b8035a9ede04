"""Clients reach the installation through the ingress and from other pods."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import openai
import pytest
import websockets

from tests.cluster.installation import Installation

MODEL = "ryzanstein-tiny"
IDLE_S = 90

GRPC_CLIENT = """
import json, sys, grpc
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    options = inference_pb2.GenerationOptions(max_tokens=40, temperature=0.9, seed=7, ignore_eos=True)
    request = inference_pb2.GenerateRequest(prompt="def ", options=options)
    stub = inference_pb2_grpc.InferenceStub(channel)
    print(json.dumps("".join(part.text for part in stub.Generate(request, timeout=60))))
"""


@pytest.fixture(scope="module")
def client(installed: Installation, ingress: str) -> openai.OpenAI:
    """Through the ingress, once it has seen the route."""
    installed.kube.until("the ingress knows the route", lambda: httpx.get(f"{ingress}/v1/models").is_success)
    return openai.OpenAI(base_url=f"{ingress}/v1", api_key="none", max_retries=0)


@pytest.mark.smoke
def test_chat_through_the_ingress(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=8)
    assert answer.usage
    assert answer.usage.completion_tokens > 0


@pytest.mark.smoke
def test_stream_arrives_while_being_generated(client: openai.OpenAI) -> None:
    """A proxy that buffers would hand over everything at the end. Drafts of so random a text are not accepted."""
    began, extra = time.monotonic(), {"ignore_eos": True}
    sampled = {"prompt": "def ", "max_tokens": 400, "temperature": 2.0}
    stream = client.completions.create(model=MODEL, **sampled, stream=True, extra_body=extra)
    arrivals = [time.monotonic() - began for _ in stream]
    assert len(arrivals) > 40
    assert arrivals[len(arrivals) // 10] < 0.5 * arrivals[-1], "the first tenth came in the first half"


@pytest.mark.smoke
def test_a_large_upload(client: openai.OpenAI) -> None:
    """4 MB reach the gateway, which has words of its own about them."""
    with pytest.raises(openai.BadRequestError) as refusal:
        client.completions.create(model=MODEL, prompt="x " * 2_000_000, max_tokens=1)
    assert refusal.value.code == "context_length_exceeded"


@pytest.mark.smoke
def test_a_websocket_through_the_ingress(client: openai.OpenAI, ingress: str) -> None:
    assert asyncio.run(_websocket(ingress, idle_s=0)) == "length"


def test_an_idle_websocket_stays_open(client: openai.OpenAI, ingress: str) -> None:
    assert asyncio.run(_websocket(ingress, idle_s=IDLE_S)) == "length"


async def _websocket(ingress: str, idle_s: float) -> str:
    """One generation after a time without a message; why it ended."""
    url = ingress.replace("http", "ws", 1)
    async with websockets.connect(f"{url}/v1/stream", ping_interval=None) as socket:
        await asyncio.sleep(idle_s)
        request = {"model": MODEL, "prompt": "def ", "max_tokens": 20, "ignore_eos": True}
        await socket.send(json.dumps({"type": "start", "id": "a", "kind": "completion", "request": request}))
        while (message := json.loads(await socket.recv()))["type"] not in ("done", "error"):
            pass
        return str(message.get("finish_reason"))


@pytest.mark.smoke
def test_grpc_from_another_pod(installed: Installation) -> None:
    """Same seed, same bytes as REST; many calls meet all workers."""
    host = f"{installed.release}-gateway-grpc.{installed.kube.namespace}:50051"
    text = json.loads(installed.kube.run("grpc-client", "gateway", "python", "-c", GRPC_CLIENT, f"dns:///{host}"))
    body = {"prompt": "def ", "max_tokens": 40, "temperature": 0.9, "seed": 7, "ignore_eos": True}
    answer = httpx.post(f"{installed.url}/v1/completions", json=body).raise_for_status().json()
    assert text == answer["choices"][0]["text"]
