"""Copies behind the steps: every complete block reaches the store before the pool evicts it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from services.common.blockhash import chain_root
from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer import device
from services.worker.kv_transfer.device import DeviceKv
from services.worker.kv_transfer.host_store import HostStore
from services.worker.kv_transfer.write_behind import WriteBehind
from services.worker.scheduling.block_pool import NULL_BLOCK, BlockPool
from tests.integration.worker_server.gateway import until
from tests.unit.worker.kv_transfer.test_disk_store import LAYOUT, SIZE, chain, content

STEP_BLOCKS, POOL_BLOCKS, SESSION_BLOCKS, N_SESSIONS = 16, 64, 48, 6


class SteppingRanks:
    """Execute one order of a copy after each step."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.gaps = asyncio.Semaphore(0)
        self.n_read = 0

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        await self.gaps.acquire()
        self.n_read += len(blocks)
        return [self.blocks[block] for block in blocks]


async def test_blocks_of_steps_that_complete_many_are_all_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step completes a whole staging area, four times the least copy; the sessions are larger than the pool."""
    monkeypatch.setattr(device, "STAGING_BYTES", STEP_BLOCKS * SIZE)
    ranks, store = SteppingRanks(), HostStore(SIZE, 1000 * SIZE, KvEventLog(), PlaceTotals())
    writer = WriteBehind(store, lambda: kv)
    pool = BlockPool(POOL_BLOCKS, 16, KvEventLog(), writer)
    kv = DeviceKv(SimpleNamespace(scheduler=SimpleNamespace(pool=pool)), ranks, LAYOUT)
    copying = asyncio.create_task(writer.run(lambda: None))
    sessions = [chain(SESSION_BLOCKS, chain_root("model", f"tenant {index}")) for index in range(N_SESSIONS)]
    for names in sessions:
        table: list[int] = []
        for at in range(0, SESSION_BLOCKS, STEP_BLOCKS):
            for block, name in zip(pool.allocate(STEP_BLOCKS), names[at : at + STEP_BLOCKS], strict=True):
                ranks.blocks[block] = content(name)
                assert pool.publish(block, table[-1] if table else NULL_BLOCK, name.digest, name.hashes)
                table.append(block)
            await copied_once(ranks, store)
        pool.release(table)
    copying.cancel()
    assert late(store) == 0
    assert all(store.lookup([name.digest for name in names]) == SESSION_BLOCKS for names in sessions)


async def copied_once(ranks: SteppingRanks, store: HostStore) -> None:
    n_read = ranks.n_read
    ranks.gaps.release()
    await until(lambda: n_read < ranks.n_read <= store.totals.stored_bytes // SIZE + late(store))


def late(store: HostStore) -> int:
    return store.totals.failures["late"]
