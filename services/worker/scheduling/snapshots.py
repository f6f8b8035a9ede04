"""Snapshots of states at ends of blocks, from which prefixes are continued: blocks alone continue no state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.request import Request

_LEAST_SPACING, _MOST_SPACING = 64, 1024  # tokens


class Reserved(NamedTuple):
    """A row of the ranks' states that a planned step writes."""

    request: Request
    position: int  # after the tokens whose state it is, the end of a block
    row: int


class Snapshots:
    """Rows after those of the slots. The snapshot whose last use is longest ago makes room for another.

    Snapshots are taken where the known tokens of a request end, at the last end of a block, and at multiples of a
    spacing that spreads them over the whole KV cache.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._size = config.block_tokens
        first = config.max_running
        self._free = list(range(first + config.snapshots - 1, first - 1, -1))
        self._rows: dict[bytes, int] = {}  # by the digest of the block; the next to replace comes first
        even = config.n_blocks * self._size // config.snapshots
        spacing = min(_MOST_SPACING, max(_LEAST_SPACING, even))
        self.spacing = -(-spacing // self._size) * self._size  # tokens

    def covered(self, digests: Sequence[bytes]) -> int:
        """Number of leading blocks, of a chain with these digests, at whose end a state is known."""
        return next((n for n in range(len(digests), 0, -1) if digests[n - 1] in self._rows), 0)

    def use(self, digest: bytes) -> int:
        """The row of a snapshot, which is now the last to be replaced."""
        row = self._rows[digest] = self._rows.pop(digest)
        return row

    def reserve(self, request: Request, start: int, end: int) -> list[Reserved]:
        """Rows for the states that a step makes of positions [start, end) of a request, as far as there are any."""
        if not request.cacheable:
            return []
        positions = list(range((start // self.spacing + 1) * self.spacing, end + 1, self.spacing))
        last = (len(request.token_ids) - 1) // self._size * self._size
        if start < last <= end and last not in positions:
            positions.append(last)
        reserved = []
        for position in sorted(positions):
            digest = self._digest(request, position)
            if digest in self._rows:
                self.use(digest)
            elif (row := self._take()) is not None:
                reserved.append(Reserved(request, position, row))
        return reserved

    def publish(self, written: Reserved) -> None:
        """Let others continue from a snapshot that the ranks have written."""
        written.request.extend_digests()
        digest = self._digest(written.request, written.position)
        if not digest or digest in self._rows:
            self._free.append(written.row)
        else:
            self._rows[digest] = written.row

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next(iter(self._rows), None)
        return None if oldest is None else self._rows.pop(oldest)

    def _digest(self, request: Request, position: int) -> bytes:
        """The digest of the block that ends at `position`; empty while its tokens are not known."""
        index = position // self._size
        return next(iter(request.block_digests(self._size, index - 1, index)), b"")
