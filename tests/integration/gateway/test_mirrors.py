"""Mirrored requests: a second model answers a share of a route's requests, without a client."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from ryzanstein.v1 import worker_pb2

from tests.integration.gateway.fleet import Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.integration.gateway.test_model_routes import BIG, SMALL, ask, gone, routes_file, to, workers
from tests.integration.gateway.test_telemetry import scrape


def mirrored(share: float = 1, **fields: Any) -> dict[str, Any]:
    return to(BIG, mirror={"model": SMALL, "share": share, **fields})


async def results(stack: GatewayStack, route: str = "chat") -> dict[str, float]:
    seen = await scrape(stack)
    words = "same", "different", "answered", "failed", "dropped"
    return {word: seen[key] for word in words if (key := ("mirrored_requests_total", SMALL, word, route)) in seen}


async def until_results(stack: GatewayStack, **expected: float) -> None:
    async with asyncio.timeout(60):
        while await results(stack) != expected:  # noqa: ASYNC110  # no event tells
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_mirror_answers_again_without_a_client_and_is_counted_apart(tmp_path: Path, path: str) -> None:
    gate = asyncio.Semaphore(0)
    fleet = [Worker("w0", model=BIG), Worker("w1", model=SMALL, steps=gate)]
    greedy: dict[str, Any] = {"model": "chat", "temperature": 0}
    greedy |= {"max_output_tokens": 16} if path == "/v1/responses" else {"max_tokens": 4}
    text = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path)
    greedy |= {text: "hi"} if text else {"messages": [{"role": "user", "content": "hi"}]}
    for worker in fleet:
        worker.token = lambda prompt, seed, position: 10 + position
    settings = {"routes_file": routes_file(tmp_path, chat=mirrored())}
    async with running_stack(fleet, **settings) as stack:
        stack.router.standby = worker_pb2.Standby(worker_id="w2", address="w2:1")
        for stream in (False, True):
            answer = await stack.http.post(path, json=greedy | {"stream": stream})
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ryzanstein-target"] == BIG
        assert await results(stack) == {}, "the answers wait for no mirror"
        for _ in range(200):
            gate.release()
        await until_results(stack, same=2)
        fleet[1].token = lambda prompt, seed, position: 10 + position + (position > 2)
        await stack.http.post(path, json=greedy)
        await until_results(stack, same=2, different=1)
        await stack.http.post(path, json=greedy | {"temperature": 1})
        await until_results(stack, same=2, different=1, answered=1)
        fleet[1].faults = [Fault("failed", 1)]
        await stack.http.post(path, json=greedy)
        await until_results(stack, same=2, different=1, answered=1, failed=1)
        seen = await scrape(stack)
        assert seen["mirrored_tokens_total", "completion", SMALL] >= 4 * 4
        assert ("tokens_total", "completion", SMALL, "") not in seen
        assert {submit.priority for submit in fleet[1].submits} == {100}
        assert all(submit.HasField("standby") for submit in fleet[0].submits)
        assert not any(submit.HasField("standby") for submit in fleet[1].submits), "a mirrored request is not resumed"


async def test_mirrored_requests_are_drawn_by_share_and_dropped_beyond_their_number(tmp_path: Path) -> None:
    gate = asyncio.Semaphore(0)
    fleet = [Worker("w0", model=BIG), Worker("w1", model=SMALL, steps=gate)]
    routes = {"chat": mirrored(max_running=3), "part": mirrored(0.25, max_running=1000)}
    async with running_stack(fleet, routes_file=routes_file(tmp_path, **routes)) as stack:
        for _ in range(8):
            assert (await ask(stack.http, "chat")).json()["model"] == BIG
        await eventually(lambda: len(fleet[1].submits) == 3)
        await until_results(stack, dropped=5)
        for _ in range(6):
            gate.release()
        await until_results(stack, dropped=5, answered=3)
        fleet[1].faults = [Fault("handoff", 0)]
        await ask(stack.http, "chat")
        gate.release()
        await until_results(stack, dropped=6, answered=3)
        before = len(fleet[1].submits)
        for _ in range(80):
            await ask(stack.http, "part", max_tokens=1)
        await eventually(lambda: len(fleet[1].submits) > before)
        assert 6 <= len(fleet[1].submits) - before <= 40
        stack.router.away = {"w1"}
        assert (await ask(stack.http, "chat")).json()["model"] == BIG
        await until_results(stack, dropped=7, answered=3)


async def test_embeddings_are_neither_mirrored_nor_answered_by_a_fallback(tmp_path: Path) -> None:
    """Those of two models are not comparable."""
    route = to(BIG, fallbacks=[{"model": SMALL}], mirror={"model": SMALL, "share": 1})
    async with running_stack(workers(), routes_file=routes_file(tmp_path, chat=route), patience_s=0.1) as stack:
        big, small = stack.workers
        body = {"model": "chat", "input": "hi"}
        assert (await stack.http.post("/v1/embeddings", json=body)).json()["model"] == BIG
        assert (await ask(stack.http, "chat")).json()["model"] == BIG
        await eventually(lambda: small.submits)  # the mirrored completion, which came later
        await gone(stack)
        refused = await stack.http.post("/v1/embeddings", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
        assert len(small.submits) == 1
        assert len(big.submits) == 2
