"""KV blocks leave one group of ranks and enter another: what they held is what is attended to there."""

from __future__ import annotations

import asyncio

import psutil
import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.process.rank_group import RanksFailedError
from services.worker.protocol.plan import Admission, Chunk, StepPlan
from tests.integration.worker_ranks.conftest import MakeGroup, RankConversation
from tests.unit.worker.rank.standin import HIDDEN

PROMPT = list(range(5, 25))
BLOCK = 16
BLOCK_BYTES = BLOCK * HIDDEN * 4


async def test_copies_keep_their_place_between_steps_and_count_like_computed_blocks(
    make_forked_group: MakeGroup,
) -> None:
    """Between two workers they move in tests/integration/worker_server/test_pulls.py."""
    ranks = 2
    group = make_forked_group(ranks)
    started = await group.start()
    assert {rank.kv_block_bytes for rank in started.ranks} == {BLOCK_BYTES}
    conversation = RankConversation(group, [PROMPT, PROMPT[::-1]])
    conversation.submit()
    early = asyncio.create_task(group.read_blocks([1], BLOCK_BYTES))
    others = [asyncio.create_task(group.read_blocks([block], BLOCK_BYTES)) for block in (3, 1, 3)]
    given_up = asyncio.create_task(group.write_blocks([7], [bytes(ranks * BLOCK_BYTES)]))
    await asyncio.sleep(0)
    given_up.cancel()
    expected = (await conversation.result()).slots[0].token_ids
    first, *rest = [(await task)[0] for task in (early, *others)]
    assert len(first) == ranks * BLOCK_BYTES
    assert rest[1] == first
    assert rest[0] == rest[2] != first
    await group.write_blocks([1, 3, 9], [rest[0], first, first])
    assert await group.read_blocks([9, 3, 1], BLOCK_BYTES) == [first, first, rest[0]]
    again = Admission(2, Sampling(), tuple(PROMPT), len(PROMPT))
    group.submit(StepPlan(1, (), (again,), (Chunk(2, BLOCK, len(PROMPT) - BLOCK, True, (9, 10)),)))
    assert [record.token_ids for record in (await conversation.result()).slots] == [expected]


async def test_invalid_copy_is_rejected_and_the_next_order_succeeds(make_forked_group: MakeGroup) -> None:
    group = make_forked_group(1)
    await group.start()
    with pytest.raises(ValueError, match="do not fit a staging area"):
        await group.read_blocks([1, 2], 16 << 20)
    with pytest.raises(ValueError, match="do not fit a staging area"):
        await group.write_blocks([1], [bytes(17 << 20)])
    assert len(await group.read_blocks([1], BLOCK_BYTES)) == 1


async def test_ranks_that_die_end_the_copies(make_forked_group: MakeGroup) -> None:
    group = make_forked_group(1)
    started = await group.start()
    stopped = psutil.Process(started.ranks[0].pid)
    stopped.suspend()
    reads = [asyncio.create_task(group.read_blocks([1], BLOCK_BYTES)) for _ in range(2)]
    await asyncio.sleep(0.05)
    assert not any(read.done() for read in reads)
    stopped.kill()
    for read in reads:
        with pytest.raises(RanksFailedError, match="rank 0"):
            await read
    with pytest.raises(RanksFailedError):
        await group.write_blocks([1], [bytes(BLOCK_BYTES)])
    started = await group.start()
    assert len(await group.read_blocks([1], BLOCK_BYTES)) == 1
    psutil.Process(started.ranks[0].pid).suspend()
    with pytest.raises(RanksFailedError, match="is stopped by a signal at step"):  # not found by the look at idle ranks
        await group.read_blocks([1], BLOCK_BYTES)
