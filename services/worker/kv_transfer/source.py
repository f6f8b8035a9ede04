"""Hands cached KV blocks out to other workers."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager

import grpc
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.kv_transfer.store import KvStore, mismatch
from services.worker.process.failure import RanksFailedError
from services.worker.scheduling.transfers import Pin

MAX_READERS = 4  # each keeps at most one staging area's worth of bytes in flight, beside gRPC's window


class PullRefusedError(Exception):
    """The blocks are not handed out; `code` says what kind of reason it is."""

    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class BlockSource:
    """Serves `PullBlocks` of one server; `store` is None while there are no ranks."""

    def __init__(self, incarnation: str, store: Callable[[], KvStore | None]) -> None:
        self._incarnation = incarnation
        self._store = store
        self._readers = 0
        self.sent: Counter[str] = Counter()  # blocks, bytes

    async def read(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        """The blocks asked for, up to the first one that is not held. Raises PullRefusedError.

        They are held until the iterator is closed; a reader that is slow has no more than one batch read ahead.
        """
        store = self._admit(request)
        with self._pinned(store, request.digests) as pin:
            at, step = request.first, store.blocks_per_copy
            while at < len(pin.blocks):
                part = pin.blocks[at : at + step]
                try:
                    contents = await store.ranks.read_blocks(part, store.layout.block_bytes)
                except RanksFailedError as error:
                    raise PullRefusedError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
                for digest, data in zip(request.digests[at : at + len(part)], contents, strict=True):
                    yield pb.KvBlock(digest=digest, data=data, crc32=zlib.crc32(data))
                    self.sent.update(blocks=1, bytes=len(data))
                at += len(part)

    def _admit(self, request: pb.PullBlocksRequest) -> KvStore:
        store = self._store()
        if store is None or request.incarnation != self._incarnation:
            raise PullRefusedError(grpc.StatusCode.NOT_FOUND, "the worker that held these blocks is gone")
        if reason := mismatch(request.layout, store.layout):
            raise PullRefusedError(grpc.StatusCode.FAILED_PRECONDITION, reason)
        if not store.blocks_per_copy:
            raise PullRefusedError(grpc.StatusCode.FAILED_PRECONDITION, "a block is too large to be moved")
        if self._readers >= MAX_READERS:
            raise PullRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_READERS} workers are reading already")
        return store

    @contextmanager
    def _pinned(self, store: KvStore, digests: Sequence[bytes]) -> Iterator[Pin]:
        pin = store.owner.scheduler.transfers.pin(digests)
        if pin is None:
            raise PullRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many blocks are being read")
        self._readers += 1
        try:
            yield pin
        finally:
            self._readers -= 1
            store.owner.unpin(pin)
