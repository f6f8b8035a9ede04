"""Copies behind the steps: every complete block reaches the store before the pool evicts it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from services.common.blockhash import chain_root
from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer import device
from services.worker.kv_transfer.device import BlockSizes, DeviceKv
from services.worker.kv_transfer.host_store import HostStore
from services.worker.kv_transfer.loader import BlockLoader
from services.worker.kv_transfer.tiers import Tiers
from services.worker.kv_transfer.write_behind import WriteBehind
from services.worker.scheduling.block_pool import NULL_BLOCK, BlockPool
from services.worker.scheduling.places import BlockName
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
    kv = DeviceKv(SimpleNamespace(scheduler=SimpleNamespace(pool=pool)), ranks, BlockSizes(LAYOUT))
    copying = asyncio.create_task(writer.run(lambda: None))
    sessions = [chain(SESSION_BLOCKS, chain_root("model", f"tenant {index}")) for index in range(N_SESSIONS)]
    for names in sessions:
        table: list[int] = []
        for at in range(0, SESSION_BLOCKS, STEP_BLOCKS):
            publish(ranks, pool, table, names[at : at + STEP_BLOCKS])
            await copied_once(ranks, store)
        pool.release(table)
    copying.cancel()
    assert late(store) == 0
    assert all(store.lookup([name.digest for name in names]) == SESSION_BLOCKS for names in sessions)


def publish(ranks: SteppingRanks, pool: BlockPool, table: list[int], names: Sequence[BlockName]) -> None:
    """The ranks have written these blocks, which follow those of the table."""
    for block, name in zip(pool.allocate(len(names)), names, strict=True):
        ranks.blocks[block] = content(name)
        assert pool.publish(block, table[-1] if table else NULL_BLOCK, name.digest, name.hashes)
        table.append(block)


async def copied_once(ranks: SteppingRanks, store: HostStore) -> None:
    n_read = ranks.n_read
    ranks.gaps.release()
    await until(lambda: n_read < ranks.n_read <= store.totals.stored_bytes // SIZE + late(store))


def late(store: HostStore) -> int:
    return store.totals.failures["late"]


class SlowStore(HostStore):
    """Writes when the test says so."""

    def __init__(self) -> None:
        super().__init__(SIZE, 1000 * SIZE, KvEventLog(), PlaceTotals())
        self.may_write = asyncio.Event()
        self.error: OSError | None = None

    async def write(self, names: Sequence[BlockName], contents: Sequence[bytes]) -> None:
        await self.may_write.wait()
        if self.error is not None:
            raise self.error
        await super().write(names, contents)

    async def holds(self, n_blocks: int) -> None:
        await until(lambda: self.totals.stored_bytes == n_blocks * SIZE)


@dataclass
class TwoTiers:
    ranks: SteppingRanks
    pool: BlockPool
    above: SlowStore
    below: SlowStore

    async def store_above(self, table: list[int], names: Sequence[BlockName]) -> None:
        """Blocks that the ranks copy to the upper store."""
        n_blocks = len(self.above)
        publish(self.ranks, self.pool, table, names)
        self.ranks.gaps.release()
        await self.above.holds(n_blocks + len(names))

    async def leave_the_last_blocks_above(self, names: Sequence[BlockName]) -> None:
        """The lower store writes the first block while the pool publishes and evicts the others."""
        table: list[int] = []
        self.above.may_write.set()
        await self.store_above(table, names[:1])
        await until(lambda: len(self.below) == 1)
        await self.store_above(table, names[1:])
        self.pool.release(table)
        self.pool.allocate(POOL_BLOCKS)
        assert len(self.below) == 1


@pytest.fixture
async def two(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TwoTiers]:
    monkeypatch.setattr(device, "STAGING_BYTES", STEP_BLOCKS * SIZE)
    above, below, ranks = SlowStore(), SlowStore(), SteppingRanks()
    tiers = Tiers((above, below), BlockLoader(lambda: 0.0), KvEventLog(), lambda: None)
    pool = BlockPool(POOL_BLOCKS, 16, KvEventLog(), tiers)
    tiers.attach(DeviceKv(SimpleNamespace(scheduler=SimpleNamespace(pool=pool)), ranks, BlockSizes(LAYOUT)))
    yield TwoTiers(ranks, pool, above, below)
    await tiers.close()


async def test_ranks_copy_a_block_once_for_two_stores(two: TwoTiers) -> None:
    names = chain(6)
    await two.leave_the_last_blocks_above(names)
    two.below.may_write.set()
    await two.below.holds(len(names))
    assert two.ranks.n_read == len(names)
    assert await two.below.read([name.digest for name in names]) == [content(name) for name in names]
    assert late(two.above) == late(two.below) == 0


async def test_block_that_pool_and_upper_store_have_evicted_is_late_for_the_lower_one(two: TwoTiers) -> None:
    names = chain(6)
    await two.leave_the_last_blocks_above(names)
    two.above.clear()
    two.below.may_write.set()
    await until(lambda: late(two.below) == len(names) - 1)
    assert two.below.lookup([name.digest for name in names]) == 1


async def test_store_that_fails_does_not_hold_up_the_one_below(two: TwoTiers) -> None:
    names = chain(6)
    two.below.may_write.set()
    publish(two.ranks, two.pool, [], names)
    two.ranks.gaps.release()
    await until(lambda: two.ranks.n_read == len(names))
    two.ranks.gaps.release()
    await asyncio.sleep(0.05)
    assert (len(two.below), two.ranks.n_read) == (0, len(names)), "it waits for the upper store"
    two.above.error = OSError("planted")
    two.above.may_write.set()
    await two.below.holds(len(names))
    assert two.above.totals.fault == "planted"
    assert await two.below.read([name.digest for name in names]) == [content(name) for name in names]


class Rows:
    """Ranks and snapshots: a state is in a row, and of two blocks and a half."""

    def __init__(self) -> None:
        self.rows = {7: b"first" * 32}
        self.holds: list[bytes] = []

    def hold(self, digest: bytes) -> int | None:
        if not self.rows:
            return None
        self.holds.append(digest)
        return next(iter(self.rows))

    def release(self, digest: bytes) -> None:
        self.holds.remove(digest)

    async def read_state(self, row: int, n_bytes: int) -> bytes:
        assert self.holds
        return self.rows[row][:n_bytes]

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        return [bytes(block_bytes)] * len(blocks)


def a_state_on_its_way(rows: Rows, n_blocks: int) -> tuple[HostStore, DeviceKv, BlockPool, asyncio.Task[None]]:
    """Copies to a store of that many blocks, of a prompt of two with the state at its end."""
    store = HostStore(SIZE, n_blocks * SIZE, KvEventLog(), PlaceTotals())
    writer = WriteBehind(store, lambda: kv)
    pool = BlockPool(4, 16, KvEventLog(), writer)
    scheduler = SimpleNamespace(pool=pool, transfers=SimpleNamespace(snapshots=rows))
    kv = DeviceKv(SimpleNamespace(scheduler=scheduler), rows, BlockSizes(LAYOUT, SIZE * 5 // 2))
    writer.saved(chain(2)[-1].digest)  # before its block
    table: list[int] = []
    for block, name in zip(pool.allocate(2), chain(2), strict=True):
        assert pool.publish(block, table[-1] if table else NULL_BLOCK, name.digest, name.hashes)
        table.append(block)
    return store, kv, pool, asyncio.create_task(writer.run(lambda: None))


async def test_state_follows_a_block_in_pieces_and_goes_first() -> None:
    rows = Rows()
    store, kv, _, copying = a_state_on_its_way(rows, 5)
    *blocks, end = chain(2)
    pieces = [name.digest for name in kv.pieces(end.digest)]
    await until(lambda: store.lookup([kv.last_piece(end.digest)]))
    copying.cancel()
    assert not rows.holds
    assert pieces[-1] == kv.last_piece(end.digest)
    content = b"".join([one or b"" for one in await store.read(pieces)])
    assert content == rows.rows[7].ljust(3 * SIZE, b"\0")
    others = chain(3, chain_root("another"))
    for held in ([1, 1], [1, 0], [0, 0]):
        assert store.prepare_store(others[held.count(0)])
        assert [store.lookup([digest]) for digest in pieces[:2]] == held
        assert store.lookup([name.digest for name in (*blocks, end)]) == 2, "the state goes first"


@pytest.mark.parametrize("cause", ["no room", "replaced"])
async def test_state_without_room_or_a_row_is_not_stored(cause: str) -> None:
    rows = Rows()
    if cause == "replaced":
        rows.rows.clear()
    store, _, _, copying = a_state_on_its_way(rows, 4 if cause == "no room" else 10)
    await until(lambda: store.totals.stored_bytes == 2 * SIZE)
    await asyncio.sleep(0.05)
    copying.cancel()
    assert len(store) == 2
    assert late(store) == (cause == "replaced")
    assert not rows.holds
