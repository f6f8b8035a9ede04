"""Models' cards outlive their workers in Redis."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from ryzanstein.v1 import worker_pb2

from services.common.keys import RedisKeys
from services.gateway.generation import cards
from services.gateway.upstream.cards import StoredCard
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import eventually, running_stack
from tests.integration.gateway.redis_server import RedisServer

BODY = {"model": MODEL, "prompt": "a", "max_tokens": 3}
KEYS = RedisKeys("default")


def stored(server: RedisServer) -> set[bytes]:
    return set(server.client.hkeys(KEYS.cards))


async def test_gateway_that_starts_without_workers_knows_the_model_and_holds_its_requests(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url) as before:
        tokens = (await before.http.post("/tokenize", json={"model": MODEL, "prompt": "three words here"})).json()
        await eventually(lambda: stored(server) == {MODEL.encode()})
    async with running_stack([], redis_url=server.url) as stack:
        stack.router.queue_s, stack.router.expected = 60, [MODEL]
        await eventually(lambda: stack.gateway.catalog.knows(MODEL))
        (listed,) = (await stack.http.get("/v1/models")).json()["data"]
        assert (listed["id"], listed["max_model_len"]) == (MODEL, 256)
        same = await stack.http.post("/tokenize", json={"model": MODEL, "prompt": "three words here"})
        assert same.json() == tokens
        refused = await stack.complete(model=MODEL, prompt="a", max_tokens=10_000)
        assert (refused.status_code, stack.router.queued) == (400, 0)
        held = asyncio.create_task(stack.complete(**BODY))
        await eventually(lambda: stack.router.queued)
        worker = Worker("w1")
        await worker.start()
        stack.router.workers.append(worker)
        assert (await held).json()["usage"]["completion_tokens"] == 3
        await worker.stop()


async def test_gateway_without_workers_follows_a_card_that_changes(server: RedisServer) -> None:
    async with running_stack([], redis_url=server.url) as late:
        late.router.expected, catalog = [MODEL], late.gateway.catalog

        def recommends(temperature: float) -> bool:
            return catalog.knows(MODEL) and catalog.get(MODEL).sampling_defaults == {"temperature": temperature}

        for temperature in (0.25, 0.5):
            worker = Worker("w0", sampling=worker_pb2.SamplingDefaults(temperature=temperature))
            async with running_stack([worker], redis_url=server.url):
                await eventually(partial(recommends, temperature))


async def test_cards_are_bounded_in_number_and_size(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "MAX_CARDS", 1)
    async with running_stack([Worker("w0", model="first")], redis_url=server.url):
        await eventually(lambda: stored(server) == {b"first"})
    monkeypatch.setattr(cards, "MAX_CARD_BYTES", 10_000)
    fits = Worker("w1", model="second")
    large = Worker("w2", model="third", template="".join(map(chr, range(500, 10_000))))
    async with running_stack([fits, large], redis_url=server.url) as stack:
        await eventually(lambda: stored(server) == {b"second"})
        assert (await stack.complete(**BODY | {"model": "third"})).status_code == 200
    assert server.client.hkeys(KEYS.card_digests) == server.client.zrange(KEYS.card_times, 0, -1) == [b"second"]


@pytest.mark.parametrize("value", [b"no card", b""])
async def test_unreadable_card_is_logged_and_ignored(
    server: RedisServer, value: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    server.client.hset(KEYS.cards, MODEL, value)
    server.client.hset(KEYS.card_digests, MODEL, "0")
    async with running_stack([], redis_url=server.url) as stack:
        stack.router.queue_s, stack.router.expected = 0.1, [MODEL]
        await eventually(lambda: stack.gateway.catalog.expects(MODEL))
        assert (await stack.complete(**BODY)).status_code == 503
        assert sum("the card of" in record.getMessage() for record in caplog.records) == 1


def test_digest_is_that_of_the_model_and_not_of_one_start() -> None:
    card = worker_pb2.ModelCard(model=MODEL, worker_id="w0", created=1, memory_bytes={"kv": 1}, max_model_len=256)
    again = worker_pb2.ModelCard(model=MODEL, worker_id="w1", created=2, memory_bytes={"kv": 2}, max_model_len=256)
    other = worker_pb2.ModelCard(model=MODEL, worker_id="w0", created=1, memory_bytes={"kv": 1}, max_model_len=128)
    digests = [StoredCard.of(each).digest for each in (card, again, other)]
    assert digests[0] == digests[1] != digests[2]
