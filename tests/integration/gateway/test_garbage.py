"""A request is freed with its answer: it leaves no cycles for a garbage collection, which walks all other requests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from ryzanstein.v1 import inference_pb2 as pb

from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.output import Generation
from services.gateway.http.exchange import Exchange, UntilDisconnect
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import eventually
from tests.integration.gateway.test_inference_grpc import inference

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True, "n": 2}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 4, "store": False}),
    ("/v1/messages", CHAT | {"stream": True}),
    ("/v1/embeddings", {"input": "hi"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/completions", {"prompt": "hi", "n": 0}),  # refused
)
OF_REQUESTS = (Exchange, UntilDisconnect, AdmittedRequest, Generation)


@pytest.fixture
def left() -> Iterator[Callable[[], list[str]]]:
    """The objects that requests have left, without a garbage collection."""
    gc.collect()
    gc.freeze()  # existing objects; a collection of all of them takes longer than a request
    gc.disable()
    yield lambda: [type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, OF_REQUESTS)]
    gc.enable()
    gc.unfreeze()


async def test_requests_leave_no_cycles(left: Callable[[], list[str]]) -> None:
    async with inference([Worker("w0", step_s=0.05)]) as (stack, stub):
        for path, body in BODIES:
            answer = await stack.http.post(path, json=body)
            assert answer.status_code == (400 if body.get("n") == 0 else 200), answer.text
            await eventually(lambda: not left())
        messages = [pb.ChatMessage(role="user", content="hi")]
        assert [part async for part in stub.Chat(pb.ChatRequest(messages=messages))]
        await eventually(lambda: not left())
