"""The KV cache of the serving ranks, as transfers from and to other places see it.

Places keep blocks of one size. A state is cut into pieces of that size, which follow the block at whose end it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, Protocol

from ryzanstein.v1 import worker_pb2 as pb

from services.common.rpc import MAX_MESSAGE_BYTES
from services.compute.ranks.config import RankGroupConfig
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.rank_config import STAGING_BYTES
from services.worker.scheduling.places import BlockName
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.transfers import Arrival, Pin

_MESSAGE_OVERHEAD = 1024  # bytes of a KvBlock besides its data


class BlockOwner(Protocol):
    """Owns the scheduler, and plans again when blocks have arrived or become free."""

    scheduler: Scheduler

    def requeue(self, requests: Iterable[Request]) -> None:
        """Queue deferred requests; skips those that have ended meanwhile."""

    def adopt(self, arrival: Arrival, n_blocks: int) -> None:
        """Publish the next blocks of an arrival, which the ranks have written."""

    def finish(self, arrival: Arrival) -> None:
        """End a transfer from another worker."""

    def unpin(self, pin: Pin) -> None:
        """Release blocks that another worker has read."""


class BlockRanks(Protocol):
    """Reads and writes KV blocks of the ranks."""

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """Contents of blocks; raises RanksFailedError."""

    async def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Overwrite blocks; raises RanksFailedError."""

    async def read_state(self, row: int, n_bytes: int) -> bytes:
        """A state of `n_bytes` on each rank, which no plan changes meanwhile; raises RanksFailedError."""

    async def write_state(self, row: int, content: bytes) -> None:
        """Overwrite a state; raises RanksFailedError."""


class BlockSizes(NamedTuple):
    """The layout of blocks, and the size of states."""

    layout: pb.KvLayout
    state_bytes: int = 0  # bytes of a state on a rank; 0: the model has none

    @property
    def n_pieces(self) -> int:
        """Number of pieces of a state."""
        return -(-self.state_bytes * self.layout.tensor_parallel // max(1, block_bytes(self.layout)))


@dataclass(frozen=True, slots=True, eq=False)
class DeviceKv:
    """The blocks' owner, the ranks that hold their bytes, and the sizes of what they hold."""

    owner: BlockOwner
    ranks: BlockRanks
    sizes: BlockSizes

    @property
    def layout(self) -> pb.KvLayout:
        """The layout of the blocks."""
        return self.sizes.layout

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

    @property
    def shared(self) -> bool:
        """Whether other workers may have blocks. Without the state at their end they continue no text."""
        return self.blocks_per_copy > 0 and not self.sizes.state_bytes

    def last_piece(self, digest: bytes) -> bytes:
        """Digest of the last piece of the state at the end of a block: a place that holds it holds all of them."""
        return _piece(self.sizes, digest, self.sizes.n_pieces - 1)

    def pieces(self, digest: bytes) -> list[BlockName]:
        """Names of the pieces of the state at the end of a block, each on top of the one before it."""
        digests = [_piece(self.sizes, digest, index) for index in range(self.sizes.n_pieces)]
        return [BlockName(own, parent, ()) for own, parent in zip(digests, (digest, *digests), strict=False)]

    async def read_state(self, row: int) -> list[bytes]:
        """The pieces of a state, the last one with zeros up to the size of a block; raises RanksFailedError."""
        content, size = await self.ranks.read_state(row, self.sizes.state_bytes), self.block_bytes
        return [content[at : at + size].ljust(size, b"\0") for at in range(0, len(content), size)]

    async def write_state(self, row: int, pieces: Sequence[bytes]) -> None:
        """Inverse of `read_state`; raises RanksFailedError."""
        size = self.sizes.state_bytes * self.layout.tensor_parallel
        await self.ranks.write_state(row, b"".join(pieces)[:size])


def _piece(of: BlockSizes, digest: bytes, index: int) -> bytes:
    return sha256(b"state" + digest + of.state_bytes.to_bytes(8, "little") + index.to_bytes(4, "little")).digest()


def block_bytes(layout: pb.KvLayout) -> int:
    """Bytes of a block on all ranks; 0 when a block is too large to transfer."""
    size = int(layout.block_bytes * layout.tensor_parallel)
    return size if size <= MAX_MESSAGE_BYTES - _MESSAGE_OVERHEAD else 0


def block_sizes(hash_root: str, config: RankGroupConfig, started: GroupStarted) -> BlockSizes:
    """The sizes on the ranks; two workers that transfer KV blocks have the same layout."""
    layout = pb.KvLayout(
        hash_root=hash_root,
        device=config.device,
        tensor_parallel=config.ranks,
        block_tokens=config.block_tokens,
        block_bytes=started.ranks[0].kv_block_bytes,
    )
    return BlockSizes(layout, started.ranks[0].state_bytes)


def mismatch(theirs: pb.KvLayout, ours: pb.KvLayout) -> str:
    """Why blocks of the layout `theirs` cannot be used with the layout `ours`; empty when they can."""
    for field in ("hash_root", "device", "tensor_parallel", "block_tokens", "block_bytes"):
        wanted, held = getattr(theirs, field), getattr(ours, field)
        if wanted != held:
            return f"{field} {wanted!r} is asked for, this worker's is {held!r}"
    return ""
