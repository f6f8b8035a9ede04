"""The servicer needs an engine, and no engine's rooms: two of them, without ranks, in one process under two ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc.aio
import pytest
from redis import Redis
from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import wire_chain
from services.common.keys import RedisKeys
from services.common.ports import free_port
from services.common.settings import ServiceSettings
from services.worker.api.card import EngineIdentity
from services.worker.api.readiness import Readiness
from services.worker.api.virtual_worker import VirtualWorker
from tests.integration.worker_server.gateway import Gateway, until
from tests.integration.worker_server.test_kv_sync import Subscriber
from tests.unit.worker.engine.fake_engine import FACTS, MODEL, FakeEngine

PROMPT = list(range(2, 42))


@dataclass
class Served:
    worker: VirtualWorker
    engine: FakeEngine
    address: str
    handoffs: list[pb.Handoff.Reason]
    readiness: Readiness


@asynccontextmanager
async def served(redis_url: str, name: str, step_s: float = 0.002) -> AsyncGenerator[Served, None]:
    port, engine, stop, readiness = free_port(), FakeEngine(step_s), asyncio.Event(), Readiness()
    handoffs: list[pb.Handoff.Reason] = []
    identity = EngineIdentity(name, f"{name}-{time.time()}", "fake", 1)
    worker = VirtualWorker(engine, identity, port, 0.1, handoffs.append)
    task = asyncio.create_task(worker.serve(ServiceSettings(redis_url=redis_url), readiness, stop))
    yield Served(worker, engine, f"127.0.0.1:{port}", handoffs, readiness)
    stop.set()
    await asyncio.wait_for(task, 60)


async def test_two_engines_in_a_process_are_two_workers(redis_url: str) -> None:
    async with AsyncExitStack() as stack:
        pair = [await stack.enter_async_context(served(redis_url, name)) for name in ("one", "two")]
        gateways = [await stack.enter_async_context(Gateway(each.address)) for each in pair]
        for each, gateway in zip(pair, gateways, strict=True):
            await gateway.wait_serving()
            await until(lambda each=each: not each.readiness())
            card = await gateway.stub.GetModelCard(pb.GetModelCardRequest())
            assert card.worker_id == each.worker.identity.worker_id == (await gateway.state()).worker_id
            assert card.incarnation == each.worker.identity.incarnation
            assert (card.architecture, card.vocab_size) == (MODEL.architecture, FACTS.vocab_size)
        with Redis.from_url(redis_url) as redis:
            assert redis.hgetall(RedisKeys("default").leases).keys() >= {b"one", b"two"}
        busy = await gateways[0].submit(PROMPT, max_tokens=200)
        await busy.at_least(1)
        assert (await gateways[1].state()).running == 0
        await gateways[0].cancel(busy)
        await gateways[0].wait_state(lambda state: state.running == 0)


async def test_an_engine_without_ranks_drives_every_call(redis_url: str) -> None:
    async with served(redis_url, "fake") as each, Gateway(each.address) as gateway:
        await gateway.wait_serving()
        whole = await gateway.complete(PROMPT, 12)
        assert whole.last.finish == pb.FINISH_REASON_LENGTH
        sampling = pb.Sampling(max_tokens=12, ignore_eos=True, logprobs=2)
        rest = await gateway.complete(PROMPT, generated_ids=whole.ids[:5], sampling=sampling)
        assert (rest.first_index, rest.ids) == (5, whole.ids[5:])
        assert [row.token_id for output in rest.outputs for row in output.logprobs] == rest.ids
        stopped = await gateway.complete(PROMPT, sampling=pb.Sampling(max_tokens=12, stop_token_ids=[whole.ids[3]]))
        assert stopped.last.finish == pb.FINISH_REASON_STOP
        assert (await gateway.complete(PROMPT, embed=True)).last.embedding

        # What the API checks, what the engine refuses, and what can never fit.
        for fields, code, name in (
            ({"sampling": pb.Sampling(top_p=2.0)}, pb.RequestError.CODE_INVALID_ARGUMENT, "sampling.top_p"),
            ({"sampling": pb.Sampling(grammar="x")}, pb.RequestError.CODE_INVALID_ARGUMENT, "sampling.grammar"),
            ({"prompt": [3] * 300}, pb.RequestError.CODE_TOO_LONG, "prompt_ids"),
        ):
            refused = await gateway.complete(fields.pop("prompt", PROMPT), **fields)
            assert (refused.last.error.code, refused.last.error.field) == (code, name)

        subscriber = Subscriber(gateway, pb.KvSyncRequest())
        await subscriber.holds(set(each.engine.cached_hashes()))
        assert subscriber.held >= set(wire_chain(MODEL.hash_root, "", PROMPT))
        subscriber.stop()

        for incarnation, code in (("another", "NOT_FOUND"), (each.worker.identity.incarnation, "FAILED_PRECONDITION")):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await gateway.stub.PullBlocks(pb.PullBlocksRequest(incarnation=incarnation)).read()
            assert error.value.code().name == code

        left = await gateway.submit(PROMPT, max_tokens=0, sampling=pb.Sampling(ignore_eos=True))
        await left.at_least(1)
        drained = await gateway.stub.Drain(pb.DrainRequest(grace_ms=0))
        assert (drained.handed_off, drained.completed) == (1, 0)
        await until(left.end.is_set)
        late = await gateway.complete(PROMPT)
        assert [answer.last.handoff.reason for answer in (left, late)] == [pb.Handoff.REASON_DRAIN] * 2
        assert each.handoffs == [pb.Handoff.REASON_DRAIN] * 2
