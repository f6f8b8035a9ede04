"""KV blocks that move between real workers: the tokens are those of a local computation, or the blocks do not count."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from tests.integration.worker_server.gateway import FakeGateway
from tests.integration.worker_server.processes import ServerProcess, server_process

PREFIX = 400  # tokens, 25 blocks
ASSUMED_BYTES_PER_S = 250e6  # before the first pull
GREEDY = pb.Sampling(max_tokens=24, ignore_eos=True)
SEEDED = pb.Sampling(max_tokens=24, ignore_eos=True, temperature=0.9, top_p=0.95, seed=11)


@dataclass
class Pair:
    """Two workers on the same model."""

    source: ServerProcess
    target: ServerProcess


@pytest.fixture(
    scope="module",
    params=[("float32", 2, "auto"), ("bfloat16", 1, "int8")],
    ids=lambda param: f"{param[0]}-tp{param[1]}-kv-{param[2]}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_url: str) -> Iterator[Pair]:
    dtype, ranks, kv_dtype = request.param
    settings = {"DTYPE": dtype, "TENSOR_PARALLEL": str(ranks), "KV_DTYPE": kv_dtype}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(server_process(tmp_path_factory.mktemp("worker"), redis_url, **settings))
            for _ in range(2)
        ]
        yield Pair(*servers)


@asynccontextmanager
async def gateways(pair: Pair) -> AsyncIterator[tuple[FakeGateway, FakeGateway]]:
    async with FakeGateway(pair.source.address) as source, FakeGateway(pair.target.address) as target:
        await source.wait_serving()
        await target.wait_serving()
        yield source, target


def prompt_of(seed: int, length: int = PREFIX + 7) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 4096) for _ in range(length)]


async def hint_to(source: FakeGateway, address: str, tokens: int = PREFIX) -> pb.PullHint:
    state = await source.state()
    return pb.PullHint(worker_id=state.worker_id, incarnation=state.incarnation, address=address, tokens=tokens)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_tokens_after_a_pull_equal_a_local_computation(pair: Pair, sampling: pb.Sampling) -> None:
    async with gateways(pair) as (source, target):
        prompt = prompt_of(1 + (sampling is SEEDED))
        local = await source.complete(prompt, sampling=sampling)
        pulled = await target.complete(prompt, sampling=sampling, pull=await hint_to(source, pair.source.address))
        assert pulled.ids == local.ids
        assert local.outputs[0].cached_tokens == 0
        assert pulled.outputs[0].cached_tokens == PREFIX
        assert (await target.state()).pull_bytes_per_s != ASSUMED_BYTES_PER_S
