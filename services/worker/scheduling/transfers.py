"""Blocks that another worker reads, and blocks that another worker sends.

Both hold references as requests do: a block that is read cannot be evicted, and blocks that arrive enter the prefix
cache one by one, each on top of a canonical parent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from services.worker.scheduling.block_pool import NULL_BLOCK, BlockPool
from services.worker.scheduling.request import Request
from services.worker.scheduling.snapshots import Snapshots

# Share of the pool that transfers may hold; peers cannot take the rest away from requests.
MAX_SHARE = 0.5


@dataclass(slots=True, eq=False)
class Pin:
    """Cached blocks that another worker reads; `blocks[i]` belongs to the i-th requested digest."""

    blocks: list[int]


@dataclass(slots=True, eq=False)
class Arrival:
    """A prefix whose missing last blocks another worker sends; they are written to `fresh`."""

    digests: list[bytes]  # digests of the missing blocks
    hashes: list[tuple[int, ...]]  # wire hashes of the missing blocks
    held: list[int]  # canonical blocks, from the first block of the prefix on
    fresh: list[int]  # allocated blocks, one per missing digest


class BlockTransfers:
    """All blocks of one pool that other workers read or send, and the snapshots of states, which other places keep."""

    def __init__(self, pool: BlockPool, snapshots: Snapshots | None = None) -> None:
        self._pool, self.snapshots = pool, snapshots
        self._pins: dict[Pin, None] = {}
        self._arrivals: dict[Arrival, None] = {}

    def __len__(self) -> int:
        return len(self._pins) + len(self._arrivals)

    def pin(self, digests: Sequence[bytes]) -> Pin | None:
        """Hold the longest cached prefix of `digests`; None when transfers hold too many blocks.

        Blocks that the reader has already are held as well, because references always cover whole prefixes.
        """
        pin = Pin(self._pool.match(digests))
        if not self._affordable(len(pin.blocks)):
            return None
        self._pool.share(pin.blocks)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin) -> None:
        """Release the blocks after the reader finished or gave up."""
        if pin in self._pins:
            del self._pins[pin]
            self._pool.release(pin.blocks)

    def expect(self, request: Request, n_tokens: int, *, least: int = 1) -> Arrival | None:
        """Allocate the missing blocks of the first `n_tokens` of `request`; None when fewer than `least` are missing.

        None as well when they do not fit.
        """
        size = self._pool.block_tokens
        digests = request.block_digests(size, 0, min(n_tokens, len(request.token_ids) - 1) // size)
        return self.expect_prefix(digests, lambda index: request.block_hashes(size, index), least=least)

    def expect_prefix(
        self, digests: Sequence[bytes], hashes_of: Callable[[int], tuple[int, ...]], *, least: int = 1
    ) -> Arrival | None:
        """Allocate the missing blocks of a prefix; None when fewer than `least` are missing, or they do not fit.

        `hashes_of` returns the wire hashes of the block with an index.
        """
        held = self._pool.match(digests)
        n_blocks = len(digests)
        n_missing = n_blocks - len(held)
        idle = self._pool.idle(held)
        if n_missing < least or n_missing > self._pool.available - idle or not self._affordable(n_missing + idle):
            return None
        self._pool.share(held)
        hashes = [hashes_of(index) for index in range(len(held), n_blocks)]
        arrival = Arrival(list(digests[len(held) :]), hashes, held, self._pool.allocate(n_missing))
        self._arrivals[arrival] = None
        return arrival

    def adopt(self, arrival: Arrival, n: int) -> None:
        """Publish the next `n` missing blocks, which are written, as if they had been computed here."""
        if arrival not in self._arrivals:
            return
        for _ in range(n):
            digest, hashes, block = arrival.digests.pop(0), arrival.hashes.pop(0), arrival.fresh.pop(0)
            parent = arrival.held[-1] if arrival.held else NULL_BLOCK
            if not self._pool.publish(block, parent, digest, hashes):
                # A request computed the same block meanwhile and uses it: the next blocks follow that block.
                self._pool.release([block])
                (block,) = self._pool.match([digest])
                self._pool.share([block])
            arrival.held.append(block)

    def finish(self, arrival: Arrival) -> None:
        """End the transfer; the blocks that arrived stay in the prefix cache."""
        if arrival in self._arrivals:
            del self._arrivals[arrival]
            self._pool.release(arrival.fresh)
            self._pool.release(arrival.held)

    def tables(self) -> Iterator[Sequence[int]]:
        """Every block reference that transfers hold, for checks."""
        for pin in self._pins:
            yield pin.blocks
        for arrival in self._arrivals:
            yield [*arrival.held, *arrival.fresh]

    def _affordable(self, n_blocks: int) -> bool:
        held = sum(len(table) for table in self.tables())
        return held + n_blocks <= self._pool.total * MAX_SHARE
