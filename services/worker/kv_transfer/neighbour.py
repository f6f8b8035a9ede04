"""Blocks of another worker, which a router named."""

from __future__ import annotations

import logging
import zlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

import grpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.rpc import open_channel
from services.common.tls.credentials import Tls
from services.worker.engine.state import TransferTotals
from services.worker.kv_transfer.device import DeviceKv
from services.worker.kv_transfer.loader import Bandwidth, LoadError

log = logging.getLogger(__name__)

REASONS = {
    grpc.StatusCode.FAILED_PRECONDITION: "mismatch",
    grpc.StatusCode.NOT_FOUND: "gone",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "busy",
    grpc.StatusCode.DEADLINE_EXCEEDED: "timeout",
    grpc.StatusCode.UNAVAILABLE: "unreachable",
}


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A reader of one pull."""

    hint: pb.PullHint
    device: DeviceKv
    speed: Bandwidth
    totals: TransferTotals
    tls: Tls | None

    async def read(self, digests: Sequence[bytes], first: int, limit_s: float) -> AsyncGenerator[bytes, None]:
        """The blocks from `first` on, up to the first one that is not held there. Raises LoadError."""
        layout = self.device.layout
        request = pb.PullBlocksRequest(
            digests=digests, first=first, incarnation=self.hint.incarnation, layout=layout
        )  # fmt: skip
        try:
            async with open_channel(self.hint.address, to="worker", tls=self.tls) as channel:
                call = worker_pb2_grpc.WorkerStub(channel).PullBlocks(request, timeout=limit_s)
                try:
                    at = first
                    async for block in call:
                        if at == len(digests):
                            raise LoadError("corrupt", "more blocks came than were asked for")
                        yield checked(block, digests[at], self.device.block_bytes)
                        at += 1
                finally:
                    call.cancel()
        except grpc.aio.AioRpcError as error:
            reason = REASONS.get(error.code(), "error")
            raise LoadError(reason, f"{error.code().name}: {error.details()}") from error

    def loaded(self, n_blocks: int, n_bytes: int) -> None:
        """Count blocks that are in the pool now."""
        self.totals.pulled_blocks += n_blocks
        self.totals.pulled_bytes += n_bytes

    def failed(self, reason: str, detail: str, n_missing: int) -> None:
        """Count and log a failure."""
        self.totals.pull_failures[reason] += 1
        log.warning(
            "KV blocks of %s could not be pulled, %d are computed instead: %s, %s",
            self.hint.worker_id, n_missing, reason, detail,
        )  # fmt: skip

    def ended(self, n_bytes: int, seconds: float) -> None:
        """Learn the speed of pulls."""
        self.totals.pulled_seconds += seconds
        if n_bytes:
            self.speed.measure(n_bytes, seconds)


def checked(block: pb.KvBlock, digest: bytes, n_bytes: int) -> bytes:
    """The block's bytes after validating digest, size and CRC; raises LoadError."""
    if block.digest != digest:
        raise LoadError("corrupt", "another block came than was due")
    if len(block.data) != n_bytes:
        raise LoadError("corrupt", f"a block of {len(block.data)} bytes came where {n_bytes} are one")
    if zlib.crc32(block.data) != block.crc32:
        raise LoadError("corrupt", "a block came with a wrong checksum")
    data: bytes = block.data
    return data
