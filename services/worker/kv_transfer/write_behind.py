"""Copies the pool's blocks to another place while steps go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.worker.kv_transfer.block_store import BlockStore
from services.worker.kv_transfer.device import DeviceKv
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.places import BlockName

_PARTS = 4  # number of smallest copies in a staging area: one delays the step after it by a millisecond or so


class WriteBehind:
    """Blocks of the pool on their way to one store, in the order of their publication.

    The pool may evict a block at any time, and the plan that overwrites it may be ordered before the copy. So the
    contents of a copy are used only if the block was not evicted until they came.
    """

    def __init__(self, store: BlockStore, device: Callable[[], DeviceKv | None]) -> None:
        self.store, self._device = store, device
        self._pending: dict[bytes, BlockName] = {}  # parents before children
        self._copying: set[bytes] = set()
        self._n_new = 0  # blocks that the store lacks, published since the last copy
        self._work = asyncio.Event()

    def published(self, name: BlockName) -> None:
        """A block can be copied."""
        self._pending[name.digest] = name
        self._n_new += name.digest not in self.store
        self._work.set()

    def evicted(self, digest: bytes) -> None:
        """A block cannot be copied any more."""
        lacks = self._pending.pop(digest, None) is not None and digest not in self.store
        if lacks or digest in self._copying:
            self.store.totals.failures["late"] += 1
        self._copying.discard(digest)

    def cleared(self) -> None:
        """No block can be copied any more."""
        self._pending.clear()
        self._copying.clear()

    async def run(self, changed: Callable[[], None]) -> None:
        """Copy until cancelled; calls `changed` after every batch. After an error a new call copies the batch again."""
        while True:
            await self._work.wait()
            device = self._device()
            if device is None or not self._pending:
                self._work.clear()
                continue
            await self._copy(device, self._most(device))
            changed()

    def _most(self, device: DeviceKv) -> int:
        """Number of blocks in the next copy: twice as many as were completed since the last one, so a backlog shrinks.

        The ranks execute one copy between two steps. It takes a small part of the time that computed its blocks.
        """
        n_new, self._n_new = self._n_new, 0
        return min(max(1, device.blocks_per_copy // _PARTS, 2 * n_new), device.blocks_per_copy)

    async def _copy(self, device: DeviceKv, most: int) -> None:
        pool, store = device.owner.scheduler.pool, self.store
        names: list[BlockName] = []
        while self._pending and len(names) < most:
            name = self._pending.pop(next(iter(self._pending)))
            if store.prepare_store(name):
                names.append(name)
        if not names:
            return
        self._copying = {name.digest for name in names}
        stored: set[bytes] = set()
        try:
            blocks = [block for name in names for block in pool.match([name.digest])]
            contents = await device.ranks.read_blocks(blocks, device.layout.block_bytes)
            copied = [(name, data) for name, data in zip(names, contents, strict=True) if name.digest in self._copying]
            self._copying.clear()
            await store.write([name for name, _ in copied], [data for _, data in copied])
            stored = {name.digest for name, _ in copied}
            store.totals.fault = ""
        except RanksFailedError:
            return  # the engine watches the ranks
        except Exception:
            there = device.owner.scheduler.pool  # an empty one if the ranks were lost meanwhile
            self._pending = {name.digest: name for name in names if name.digest in there} | self._pending
            raise
        finally:
            self._copying.clear()
            for name in names:
                store.complete_store(name, stored=name.digest in stored)
