"""The KV cache of the serving ranks, as transfers from and to other places see it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.v1 import worker_pb2 as pb

from services.common.rpc import MAX_MESSAGE_BYTES
from services.compute.ranks.config import RankGroupConfig
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.rank_config import STAGING_BYTES
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.transfers import Arrival, Pin

_MESSAGE_OVERHEAD = 1024  # bytes of a KvBlock besides its data


class BlockOwner(Protocol):
    """Owns the scheduler, and plans again when blocks have arrived or become free."""

    scheduler: Scheduler

    def requeue(self, requests: Iterable[Request]) -> None:
        """Queue deferred requests; skips those that have ended meanwhile."""
        ...

    def adopt(self, arrival: Arrival, n_blocks: int) -> None:
        """Publish the next blocks of an arrival, which the ranks have written."""
        ...

    def finish(self, arrival: Arrival) -> None:
        """End a transfer from another worker."""
        ...

    def unpin(self, pin: Pin) -> None:
        """Release blocks that another worker has read."""
        ...


class BlockRanks(Protocol):
    """Reads and writes KV blocks of the ranks."""

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """Contents of blocks; raises RanksFailedError."""
        ...

    async def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Overwrite blocks; raises RanksFailedError."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKv:
    """The blocks' owner, the ranks that hold their bytes, and the layout of the bytes."""

    owner: BlockOwner
    ranks: BlockRanks
    layout: pb.KvLayout

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on all ranks; 0 when a block is too large to transfer."""
        return block_bytes(self.layout)

    @property
    def blocks_per_copy(self) -> int:
        """Number of blocks that fit the staging area; 0 when a single block is too large to transfer."""
        return int(STAGING_BYTES // self.layout.block_bytes) if self.block_bytes else 0

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV on all ranks; 0 when blocks cannot be transferred."""
        return self.block_bytes // self.layout.block_tokens if self.blocks_per_copy else 0


def block_bytes(layout: pb.KvLayout) -> int:
    """Bytes of a block on all ranks; 0 when a block is too large to transfer."""
    size = int(layout.block_bytes * layout.tensor_parallel)
    return size if size <= MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD else 0


def kv_layout(hash_root: str, config: RankGroupConfig, started: GroupStarted) -> pb.KvLayout:
    """Properties that must be equal on two workers that transfer KV blocks."""
    return pb.KvLayout(
        hash_root=hash_root,
        device=config.device,
        tensor_parallel=config.ranks,
        block_tokens=config.block_tokens,
        block_bytes=started.ranks[0].kv_block_bytes,
    )


def mismatch(theirs: pb.KvLayout, ours: pb.KvLayout) -> str:
    """Why blocks of the layout `theirs` cannot be used with the layout `ours`; empty when they can."""
    for field in ("hash_root", "device", "tensor_parallel", "block_tokens", "block_bytes"):
        wanted, held = getattr(theirs, field), getattr(ours, field)
        if wanted != held:
            return f"{field} {wanted!r} is asked for, this worker's is {held!r}"
    return ""
