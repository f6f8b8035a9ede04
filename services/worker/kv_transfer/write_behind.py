"""Copies the pool's blocks, and snapshots of states, to another place while steps go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import takewhile

from services.worker.kv_transfer.block_store import BlockStore
from services.worker.kv_transfer.device import DeviceKv
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.block_pool import BlockPool
from services.worker.scheduling.places import BlockName

_PARTS = 4  # number of smallest copies in a staging area: one delays the step after it by a millisecond or so


class WriteBehind:
    """Blocks of the pool on their way to one store, in the order of their publication.

    The pool may evict a block at any time, and the plan that overwrites it may be ordered before the copy. So the
    contents of a copy are used only if the block was not evicted until they came. A snapshot is held while it is
    copied, and copied once the store has its block.

    A block goes through the stores from `above` down, so the ranks copy it once: a store takes it from the one above,
    also after the pool has evicted it, and from the pool only if the one above has not kept it.
    """

    def __init__(
        self, store: BlockStore, device: Callable[[], DeviceKv | None], above: WriteBehind | None = None
    ) -> None:
        self.store, self._device, self._above = store, device, above
        self._pending: dict[bytes, BlockName] = {}  # parents before children
        self._states: dict[bytes, None] = {}  # digests of the blocks at whose ends they are
        self._copying: set[bytes] = set()  # blocks whose contents come from the pool
        self._n_new = 0  # blocks that the store lacks, published since the last copy
        self._work = asyncio.Event()

    def published(self, name: BlockName) -> None:
        """A block can be copied."""
        self._pending[name.digest] = name
        self._n_new += name.digest not in self.store
        self._work.set()

    def evicted(self, digest: bytes) -> None:
        """A block cannot be copied from the pool any more."""
        lost = digest in self._pending and not self._is_above(digest)
        if lost:
            del self._pending[digest]
            self._work.set()  # later blocks may have waited behind this one
        if (lost and digest not in self.store) or digest in self._copying:
            self.store.totals.failures["late"] += 1
        self._copying.discard(digest)

    def saved(self, digest: bytes) -> None:
        """A snapshot can be copied."""
        self._states[digest] = None
        self._work.set()

    def cleared(self) -> None:
        """No block or snapshot can be copied from the pool any more."""
        self._pending = {digest: name for digest, name in self._pending.items() if self._is_above(digest)}
        self._states.clear()
        self._copying.clear()

    def expects(self, digest: bytes) -> bool:
        """Whether the store is going to have a block."""
        return digest in self._pending or (digest in self.store and not self.store.lookup((digest,)))

    def wake(self) -> None:
        """The ranks serve, or the store above has stored blocks or failed."""
        self._work.set()

    async def run(self, changed: Callable[[], None]) -> None:
        """Copy until cancelled; calls `changed` after every batch. After an error a new call copies the batch again."""
        while True:
            await self._work.wait()
            device = self._device()
            if device is None or not self._ready():
                self._work.clear()
                continue
            if (digest := self._next_state()) is not None:
                await self._copy_state(device, digest)
            elif self._pending:
                await self._copy(device, self._most(device))
            else:  # their blocks were not kept
                self.store.totals.failures["late"] += len(self._states)
                self._states.clear()
            changed()

    def _ready(self) -> bool:
        """Whether there is something to copy that waits for no other store."""
        if self._next_state() is not None:
            return True
        return not self._waits_for(next(iter(self._pending))) if self._pending else bool(self._states)

    def _next_state(self) -> bytes | None:
        return next((digest for digest in self._states if digest in self.store), None)

    def _most(self, device: DeviceKv) -> int:
        """Number of blocks in the next copy: twice as many as were completed since the last one, so a backlog shrinks.

        The ranks execute one copy between two steps. It takes a small part of the time that computed its blocks.
        """
        n_new, self._n_new = self._n_new, 0
        return min(max(1, device.blocks_per_copy // _PARTS, 2 * n_new), device.blocks_per_copy)

    def _waits_for(self, digest: bytes) -> bool:
        """Whether the store above is going to have a block; one that fails is not waited for."""
        above = self._above
        return above is not None and not above.store.totals.fault and above.expects(digest)

    def _is_above(self, digest: bytes) -> bool:
        return self._above is not None and self._above.store.lookup((digest,)) == 1

    async def _copy(self, device: DeviceKv, most: int) -> None:
        pool, store = device.owner.scheduler.pool, self.store
        names = self._prepare(pool, most)
        if not names:
            return
        contents: dict[bytes, bytes] = {}
        stored = False
        try:
            contents = await self._read(device, [name.digest for name in names])
            there = [name for name in names if name.digest in contents]
            await store.write(there, [contents[name.digest] for name in there])
            stored, store.totals.fault = True, ""
        except RanksFailedError:
            return  # the engine watches the ranks
        except Exception:
            pool = device.owner.scheduler.pool  # an empty one if the ranks were lost meanwhile
            again = {name.digest: name for name in names if name.digest in pool or self._is_above(name.digest)}
            self._pending = again | self._pending
            raise
        finally:
            self._copying.clear()
            for name in names:
                store.complete_store(name, stored=stored and name.digest in contents)

    def _prepare(self, pool: BlockPool, most: int) -> list[BlockName]:
        """The next blocks, with room for them in the store."""
        names: list[BlockName] = []
        while self._pending and len(names) < most:
            digest = next(iter(self._pending))
            if self._waits_for(digest):
                break
            name = self._pending.pop(digest)
            if digest not in pool and not self._is_above(digest):  # the one above has evicted it as well
                self.store.totals.failures["late"] += digest not in self.store
            elif self.store.prepare_store(name):
                names.append(name)
        return names

    async def _read(self, device: DeviceKv, digests: Sequence[bytes]) -> dict[bytes, bytes]:
        """Contents by digest, without those of blocks that the pool has evicted meanwhile."""
        from_above = [digest for digest in digests if self._is_above(digest)]
        self._copying = set(digests).difference(from_above)
        if self._above is None or not from_above:
            return await self._read_pool(device)
        store = self._above.store
        held = store.prepare_load(from_above)
        try:
            contents = await self._read_pool(device)
            passed = zip(from_above, await store.read(from_above), strict=False)  # the read ends with a damaged block
            return contents | {digest: content for digest, content in passed if content is not None}
        finally:
            store.complete_load(held)

    async def _read_pool(self, device: DeviceKv) -> dict[bytes, bytes]:
        digests = list(self._copying)
        if not digests:
            return {}
        blocks = [block for digest in digests for block in device.owner.scheduler.pool.match([digest])]
        contents = await device.ranks.read_blocks(blocks, device.layout.block_bytes)
        copied = {digest: content for digest, content in zip(digests, contents, strict=True) if digest in self._copying}
        self._copying.clear()
        return copied

    async def _copy_state(self, device: DeviceKv, digest: bytes) -> None:
        del self._states[digest]
        store, names = self.store, device.pieces(digest)
        missing = [name for name in names if name.digest not in store]  # the last ones
        if missing:
            await self._copy_pieces(device, digest, missing)
        store.touch([name.digest for name in names])  # the last piece is the first that may go

    async def _copy_pieces(self, device: DeviceKv, digest: bytes, names: list[BlockName]) -> None:
        snapshots, store = device.owner.scheduler.transfers.snapshots, self.store
        assert snapshots is not None, "there are snapshots"
        if (row := snapshots.hold(digest)) is None:
            store.totals.failures["late"] += 1
            return
        stored, reserved = False, list(takewhile(store.prepare_store, names))
        whole = len(reserved) == len(names)
        try:
            try:
                contents = (await device.read_state(row))[-len(names) :] if whole else []
            finally:
                snapshots.release(digest)
            if whole:
                await store.write(names, contents)
                stored, store.totals.fault = True, ""
        except RanksFailedError:
            return  # the engine watches the ranks
        except Exception:
            self._states[digest] = None
            raise
        finally:
            for name in reserved:
                store.complete_store(name, stored=stored)
