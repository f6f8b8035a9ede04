"""States leave a rank's rows and come back bit for bit, in pieces that cut layers anywhere."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from services.compute.backends.shapes import StateFormat, StatePart
from services.compute.backends.states import StateStore
from services.worker.process.block_copies import BlockCopies
from services.worker.protocol.order_codec import CopyOrder, StateOrder
from services.worker.rank.state_copy import StateCopier

FORMAT = StateFormat(((StatePart((3, 5)), StatePart((2, 2, 4), exact=True)), (), (StatePart((7,)),)))
ROW_BYTES = FORMAT.row_bytes(itemsize=2)
N_ROWS, RANKS = 4, 2


def a_store(seed: int) -> StateStore:
    states = StateStore(FORMAT, N_ROWS, torch.bfloat16, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    for parts in states.layers:
        for part in parts:
            part.copy_(torch.randn(part.shape, generator=generator))
    return states


def bits(states: StateStore, row: int) -> list[bytes]:
    return [part[row].contiguous().view(torch.uint8).numpy().tobytes() for parts in states.layers for part in parts]


@pytest.mark.parametrize("staging_bytes", [1, 7, 13, ROW_BYTES, 1000])
async def test_state_of_all_ranks_is_moved_to_another_row_and_no_other_changes(staging_bytes: int) -> None:
    areas = [memoryview(bytearray(staging_bytes)) for _ in range(RANKS)]
    stores = [a_store(seed) for seed in range(RANKS)]
    copiers = [StateCopier(states, area) for states, area in zip(stores, areas, strict=True)]
    assert [copier.row_bytes for copier in copiers] == [ROW_BYTES] * RANKS

    def send(order: CopyOrder | StateOrder) -> asyncio.Future[str]:
        assert isinstance(order, StateOrder)
        assert order.size <= staging_bytes
        for copier in copiers:
            copier.copy(order)
        done: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        done.set_result("")
        return done

    copies = BlockCopies(areas, send)
    before = [[bits(states, row) for row in range(N_ROWS)] for states in stores]
    content = await copies.read_state(1, ROW_BYTES)
    assert content == b"".join(b"".join(rows[1]) for rows in before)
    await copies.write_state(3, content)
    for states, rows in zip(stores, before, strict=True):
        assert [bits(states, row) for row in range(N_ROWS)] == [*rows[:3], rows[1]]


@pytest.mark.parametrize("seed", range(3))
def test_any_piece_of_a_row_is_those_bytes(seed: int) -> None:
    rng, states = random.Random(seed), a_store(seed)
    staging = memoryview(bytearray(ROW_BYTES))
    copier, whole = StateCopier(states, staging), b"".join(bits(states, 2))
    for _ in range(50):
        start = rng.randrange(ROW_BYTES)
        size = rng.randrange(1, ROW_BYTES - start + 1)
        copier.copy(StateOrder(True, 2, start, size))
        assert bytes(staging[:size]) == whole[start : start + size]


def test_copies_are_timed_where_there_are_snapshots() -> None:
    copier = StateCopier(a_store(0), memoryview(bytearray(8)))
    assert copier.measure(N_ROWS) == 0
    assert copier.measure(N_ROWS - 1) > 0
    none = StateCopier(None, memoryview(bytearray(8)))
    assert (none.row_bytes, none.measure(0)) == (0, 0)
