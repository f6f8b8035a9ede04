"""The KV cache of ranks that serve, as far as other workers are concerned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ryzanstein.v1 import worker_pb2 as pb

from services.common.rpc import MAX_MESSAGE_BYTES
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.rank_config import STAGING_BYTES, RankGroupConfig
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.transfers import Arrival, Pin

_MESSAGE_OVERHEAD = 1024  # of a KvBlock, beside its data


class BlockOwner(Protocol):
    """Who decides about the blocks, and plans again when some have come or are free."""

    scheduler: Scheduler

    def requeue(self, requests: Iterable[Request]) -> None:
        """Begin with deferred requests; those that have ended meanwhile are left alone."""
        ...

    def adopt(self, arrival: Arrival, n_blocks: int) -> None:
        """The ranks have written the next blocks of an arrival."""
        ...

    def finish(self, arrival: Arrival) -> None:
        """Nothing more arrives."""
        ...

    def unpin(self, pin: Pin) -> None:
        """Another worker has read the blocks."""
        ...


class BlockRanks(Protocol):
    """Ranks that let KV blocks in and out."""

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """The contents of blocks; raises RanksFailedError."""
        ...

    async def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Overwrite blocks; raises RanksFailedError."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class KvStore:
    """Who decides about the blocks, who holds their bytes, and what the bytes mean."""

    owner: BlockOwner
    ranks: BlockRanks
    layout: pb.KvLayout

    @property
    def block_bytes(self) -> int:
        """Bytes of a block on all ranks."""
        return int(self.layout.block_bytes * self.layout.tensor_parallel)

    @property
    def blocks_per_copy(self) -> int:
        """Blocks that pass the staging area at once; 0: a block is too large to be moved at all."""
        size = self.layout.block_bytes
        if not size or self.block_bytes > MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD:
            return 0
        return int(STAGING_BYTES // size)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token's KV on all ranks; 0 when blocks cannot be moved."""
        return self.block_bytes // self.layout.block_tokens if self.blocks_per_copy else 0


def kv_layout(hash_root: str, config: RankGroupConfig, started: GroupStarted) -> pb.KvLayout:
    """What must be equal on two workers before KV blocks move between them."""
    return pb.KvLayout(
        hash_root=hash_root,
        device=config.device,
        tensor_parallel=config.ranks,
        block_tokens=config.block_tokens,
        block_bytes=started.ranks[0].kv_block_bytes,
    )


def mismatch(theirs: pb.KvLayout, ours: pb.KvLayout) -> str:
    """Why KV of one layout cannot be used under the other; empty when it can."""
    for field in ("hash_root", "device", "tensor_parallel", "block_tokens", "block_bytes"):
        asked, held = getattr(theirs, field), getattr(ours, field)
        if asked != held:
            return f"{field} {asked!r} is asked for, this worker's is {held!r}"
    return ""
