"""Sends cached KV blocks to other workers."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.errors import BlocksUnavailableError, Unavailable
from services.worker.engine.state import TransferTotals
from services.worker.kv_transfer.device import DeviceKv, mismatch
from services.worker.kv_transfer.tiers import Tiers
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.transfers import Pin

MAX_READERS = 4  # each keeps at most the bytes of one staging area in flight, besides gRPC's window


class BlockSource:
    """Reads blocks for other workers; `store` is None while there are no ranks, `tiers` before the first start."""

    def __init__(
        self, store: Callable[[], DeviceKv | None], tiers: Callable[[], Tiers | None], totals: TransferTotals
    ) -> None:
        self._store, self._tiers, self._totals = store, tiers, totals
        self._readers = 0

    async def read(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """The requested blocks, up to the first one in neither the pool nor host memory. Raises BlocksUnavailableError.

        Blocks of the pool are pinned until the iterator is closed. At most one batch is read ahead of a slow reader.
        """
        store = self._admit(request)
        with self._pinned(store, request.digests) as pin:
            at, step = request.first, store.blocks_per_copy
            while contents := await self._contents(store, pin.blocks[at : at + step], request.digests[at : at + step]):
                for digest, data in zip(request.digests[at : at + len(contents)], contents, strict=True):
                    yield pb.KvBlock(digest=digest, data=data, crc32=zlib.crc32(data))
                    self._totals.sent_blocks += 1
                    self._totals.sent_bytes += len(data)
                at += len(contents)

    async def _contents(self, store: DeviceKv, blocks: Sequence[int], digests: Sequence[bytes]) -> Sequence[bytes]:
        """Contents of the pool's `blocks`; without any, of the first of `digests` that host memory holds."""
        if not blocks:
            tiers = self._tiers()
            return await tiers.read_host(digests) if tiers is not None else []
        try:
            return await store.ranks.read_blocks(blocks, store.layout.block_bytes)
        except RanksFailedError as error:
            raise BlocksUnavailableError(Unavailable.LOST, str(error)) from error

    def _admit(self, request: pb.PullBlocksRequest) -> DeviceKv:
        store = self._store()
        if store is None:
            raise BlocksUnavailableError(Unavailable.GONE, "the ranks that held these blocks are gone")
        if reason := mismatch(request.layout, store.layout):
            raise BlocksUnavailableError(Unavailable.MISMATCH, reason)
        if not store.shared:
            reason = "blocks of this model are not moved: too large, or without their states"
            raise BlocksUnavailableError(Unavailable.MISMATCH, reason)
        if self._readers >= MAX_READERS:
            raise BlocksUnavailableError(Unavailable.BUSY, f"{MAX_READERS} workers are reading already")
        return store

    @contextmanager
    def _pinned(self, store: DeviceKv, digests: Sequence[bytes]) -> Iterator[Pin]:
        pin = store.owner.scheduler.transfers.pin(digests)
        if pin is None:
            raise BlocksUnavailableError(Unavailable.BUSY, "too many blocks are being read")
        self._readers += 1
        try:
            yield pin
        finally:
            self._readers -= 1
            store.owner.unpin(pin)
