"""KV blocks that move between real workers: the tokens are those of a local computation, or the blocks do not count."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from tests.integration.worker_server.gateway import Gateway
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
async def gateways(pair: Pair) -> AsyncIterator[tuple[Gateway, Gateway]]:
    async with Gateway(pair.source.address) as source, Gateway(pair.target.address) as target:
        await source.wait_serving()
        await target.wait_serving()
        yield source, target


def prompt_of(seed: int, length: int = PREFIX + 7) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 4096) for _ in range(length)]


async def hint_to(source: Gateway, address: str, tokens: int = PREFIX) -> pb.PullHint:
    state = await source.state()
    return pb.PullHint(worker_id=state.worker_id, incarnation=state.incarnation, address=address, tokens=tokens)


async def check_pull(source: Gateway, target: Gateway, address: str, prompt: list[int], sampling: pb.Sampling) -> None:
    """The target generates what the source did, from the source's blocks."""
    local = await source.complete(prompt, sampling=sampling)
    pulled = await target.complete(prompt, sampling=sampling, pull=await hint_to(source, address))
    assert pulled.ids == local.ids
    assert local.outputs[0].cached_tokens == 0
    assert pulled.outputs[0].cached_tokens == PREFIX


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_tokens_after_a_pull_equal_a_local_computation(pair: Pair, sampling: pb.Sampling) -> None:
    async with gateways(pair) as (source, target):
        await check_pull(source, target, pair.source.address, prompt_of(1 + (sampling is SEEDED)), sampling)
        assert (await target.state()).pull_bytes_per_s != ASSUMED_BYTES_PER_S


async def test_pull_from_another_dtype_or_a_killed_source_is_replaced_by_prefill(
    tmp_path: Path, redis_url: str
) -> None:
    """A stopped rank never answers the order to copy: the pull is under way when its source dies."""
    with (
        server_process(tmp_path, redis_url, DTYPE="bfloat16") as source,
        server_process(tmp_path, redis_url, DTYPE="bfloat16") as target,
        server_process(tmp_path, redis_url, DTYPE="float32") as other,
    ):
        async with gateways(Pair(source, target)) as (from_source, from_target), Gateway(other.address) as from_other:
            await from_other.wait_serving()
            await check_pull(from_source, from_target, source.address, prompt_of(4), GREEDY)

            prompt = prompt_of(5)
            await from_source.complete(prompt, sampling=GREEDY)
            hint = await hint_to(from_source, source.address)
            computed = await from_other.complete(prompt, sampling=GREEDY, pull=hint)
            assert computed.outputs[0].cached_tokens == 0
            assert computed.ids == (await from_other.complete(prompt, sampling=GREEDY)).ids

            prompt = prompt_of(3)
            local = await from_source.complete(prompt, sampling=GREEDY)
            idle = (await from_source.state()).kv_blocks_used
            (rank,) = source.ranks()
            rank.suspend()
            pulled = await from_target.submit(prompt, sampling=GREEDY, pull=hint)
            async with asyncio.timeout(60):
                while (await from_source.state()).kv_blocks_used == idle:  # noqa: ASYNC110 - it is told now and then
                    await asyncio.sleep(0.01)
            source.process.kill()
            rank.kill()
            await asyncio.wait_for(pulled.end.wait(), 60)
            assert pulled.ids == local.ids
            assert pulled.outputs[0].cached_tokens == 0
        assert "hash_root" in other.log.read_text()
        assert "could not be pulled" in target.log.read_text()
