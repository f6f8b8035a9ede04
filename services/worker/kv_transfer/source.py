"""Sends cached KV blocks to other workers."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.errors import BlocksUnavailableError, Unavailable
from services.worker.engine.state import TransferTotals
from services.worker.kv_transfer.device import DeviceKv, mismatch
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.transfers import Pin

MAX_READERS = 4  # each keeps at most the bytes of one staging area in flight, besides gRPC's window


class BlockSource:
    """Reads blocks for other workers; `store` is None while there are no ranks."""

    def __init__(self, store: Callable[[], DeviceKv | None], totals: TransferTotals) -> None:
        self._store, self._totals = store, totals
        self._readers = 0

    async def read(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """The requested blocks, up to the first block that is not cached. Raises BlocksUnavailableError.

        The blocks are pinned until the iterator is closed. At most one batch is read ahead of a slow reader.
        """
        store = self._admit(request)
        with self._pinned(store, request.digests) as pin:
            at, step = request.first, store.blocks_per_copy
            while at < len(pin.blocks):
                part = pin.blocks[at : at + step]
                try:
                    contents = await store.ranks.read_blocks(part, store.layout.block_bytes)
                except RanksFailedError as error:
                    raise BlocksUnavailableError(Unavailable.LOST, str(error)) from error
                for digest, data in zip(request.digests[at : at + len(part)], contents, strict=True):
                    yield pb.KvBlock(digest=digest, data=data, crc32=zlib.crc32(data))
                    self._totals.sent_blocks += 1
                    self._totals.sent_bytes += len(data)
                at += len(part)

    def _admit(self, request: pb.PullBlocksRequest) -> DeviceKv:
        store = self._store()
        if store is None:
            raise BlocksUnavailableError(Unavailable.GONE, "the ranks that held these blocks are gone")
        if reason := mismatch(request.layout, store.layout):
            raise BlocksUnavailableError(Unavailable.MISMATCH, reason)
        if not store.blocks_per_copy:
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
