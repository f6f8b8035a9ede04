"""Blocks that leave for another worker, and blocks on their way from one.

Both hold references like a request does: what is read cannot be evicted meanwhile, and what arrives enters the prefix
cache block by block, always on top of a canonical parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.worker.scheduling.block_pool import NULL_BLOCK, BlockPool
from services.worker.scheduling.request import Request

# Blocks that transfers may hold: the rest of the pool keeps serving whatever peers do.
MAX_SHARE = 0.5


@dataclass(slots=True, eq=False)
class Pin:
    """Cached blocks that another worker reads: `blocks[i]` is the one of the i-th digest asked for."""

    blocks: list[int]


@dataclass(slots=True, eq=False)
class Arrival:
    """A prefix of which another worker sends the end: digests `[len(held) :]`, to be written to `fresh`."""

    digests: list[bytes]  # of the blocks that are missing
    hashes: list[tuple[int, ...]]  # their wire hashes
    held: list[int]  # canonical, from the first block of the prefix on
    fresh: list[int]  # allocated, one per digest


class Transfers:
    """All blocks of one pool that are held on behalf of other workers or expected from them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._pins: dict[Pin, None] = {}
        self._arrivals: dict[Arrival, None] = {}

    def __len__(self) -> int:
        return len(self._pins) + len(self._arrivals)

    def pin(self, digests: Sequence[bytes]) -> Pin | None:
        """Hold the longest run of `digests` that is cached, from the first on; None when transfers hold too much.

        The blocks before it, which a reader has already, are held as well: whoever holds blocks holds whole prefixes.
        """
        pin = Pin(self._pool.match(digests))
        if not self._affordable(len(pin.blocks)):
            return None
        self._pool.share(pin.blocks)
        self._pins[pin] = None
        return pin

    def unpin(self, pin: Pin) -> None:
        """The blocks have been read, or nobody wants them any more."""
        if pin in self._pins:
            del self._pins[pin]
            self._pool.release(pin.blocks)

    def expect(self, request: Request, n_tokens: int) -> Arrival | None:
        """Make room for what is missing of the first `n_tokens` of `request`; None when nothing is, or no room."""
        size = self._pool.block_tokens
        n_blocks = min(n_tokens, len(request.token_ids) - 1) // size
        digests = request.block_digests(size, 0, n_blocks)
        held = self._pool.match(digests)
        n_missing = n_blocks - len(held)
        idle = self._pool.idle(held)
        if n_missing < 1 or n_missing > self._pool.available - idle or not self._affordable(n_missing + idle):
            return None
        self._pool.share(held)
        missing = range(len(held), n_blocks)
        hashes = [request.block_hashes(size, index) for index in missing]
        arrival = Arrival(digests[len(held) :], hashes, held, self._pool.allocate(n_missing))
        self._arrivals[arrival] = None
        return arrival

    def adopt(self, arrival: Arrival, n: int) -> None:
        """The next `n` missing blocks are written: they enter the prefix cache as if they had been computed here."""
        if arrival not in self._arrivals:
            return
        for _ in range(n):
            digest, hashes, block = arrival.digests.pop(0), arrival.hashes.pop(0), arrival.fresh.pop(0)
            parent = arrival.held[-1] if arrival.held else NULL_BLOCK
            if not self._pool.publish(block, parent, digest, hashes):
                # Somebody computed the same block meanwhile and uses it: what follows goes on top of that one.
                self._pool.release([block])
                (block,) = self._pool.match([digest])
                self._pool.share([block])
            arrival.held.append(block)

    def finish(self, arrival: Arrival) -> None:
        """Nothing more will arrive; what did stays in the prefix cache."""
        if arrival in self._arrivals:
            del self._arrivals[arrival]
            self._pool.release(arrival.fresh)
            self._pool.release(arrival.held)

    def tables(self) -> Iterator[Sequence[int]]:
        """Every reference that transfers hold, for the checks."""
        for pin in self._pins:
            yield pin.blocks
        for arrival in self._arrivals:
            yield [*arrival.held, *arrival.fresh]

    def _affordable(self, n_blocks: int) -> bool:
        held = sum(len(table) for table in self.tables())
        return held + n_blocks <= self._pool.total * MAX_SHARE
