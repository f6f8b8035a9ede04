"""Waiting messages are sent together, in order, and within gRPC's limit."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from ryzanstein.v1 import worker_pb2 as pb

from services.common.batches import MAX_BATCH, MAX_BATCH_BYTES, batches
from services.common.rpc import MAX_MESSAGE_BYTES

sizes = st.lists(st.sampled_from([1, 1_000, 400_000, MAX_BATCH_BYTES]), max_size=80)


@given(sizes)
def test_batches_keep_all_messages_in_order_and_are_bounded(lengths: list[int]) -> None:
    async def read() -> list[list[pb.Cancel]]:
        queue: asyncio.Queue[pb.Cancel | None] = asyncio.Queue()
        for length in lengths:
            queue.put_nowait(pb.Cancel(request_id="x" * length))
        queue.put_nowait(None)
        return [batch async for batch in batches(queue)]

    actual = asyncio.run(read())
    assert [len(item.request_id) for batch in actual for item in batch] == lengths
    for i, batch in enumerate(actual):
        n_bytes = sum(item.ByteSize() for item in batch[:-1])
        assert len(batch) <= MAX_BATCH
        assert n_bytes < MAX_BATCH_BYTES
        full = len(batch) == MAX_BATCH or n_bytes + batch[-1].ByteSize() >= MAX_BATCH_BYTES
        assert full or i == len(actual) - 1, "no call was left behind"


def test_a_batch_plus_a_long_prompt_fits_a_grpc_message() -> None:
    prompt = pb.Submit(prompt_ids=[200_000] * 2_000_000)
    assert MAX_BATCH_BYTES + prompt.ByteSize() < MAX_MESSAGE_BYTES
