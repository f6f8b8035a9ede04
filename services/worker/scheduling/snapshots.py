"""Snapshots of states at ends of blocks, from which prefixes are continued: blocks alone continue no state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.places import Places
from services.worker.scheduling.request import Request

_LEAST_SPACING, _MOST_SPACING = 64, 1024  # tokens, by the size of the KV cache
_SHARE = 1 / 32  # largest part of the time of a long prompt for its snapshots
_COPIES = 2  # a snapshot's: when it is taken, and when a request begins with it


class Reserved(NamedTuple):
    """A row of the ranks' states that a planned step writes."""

    request: Request
    position: int  # after the tokens whose state it is, the end of a block
    row: int


class Snapshots:
    """Rows after those of the slots. The snapshot whose last use is longest ago makes room for another.

    Snapshots are taken where the known tokens of a request end, at the last end of a block, and at multiples of a
    spacing that spreads them over the whole KV cache. Copies cost time: the spacing grows until they take a small share
    of a prompt's, and none is taken at an end that is computed sooner than it is copied.
    """

    def __init__(self, config: SchedulerConfig, places: Places) -> None:
        """`places` are told of each snapshot."""
        self._places, self._size, self._copy_s = places, config.block_tokens, config.snapshot_s
        first = config.max_running
        self._free = list(range(first + config.snapshots - 1, first - 1, -1))
        self._rows: dict[bytes, int] = {}  # by the digest of the block; the next to replace comes first
        self._holds = Counter[bytes]()  # copies to other places in progress, during which none is replaced
        even = config.n_blocks * self._size // config.snapshots
        self._even = min(_MOST_SPACING, max(_LEAST_SPACING, even))
        self.adapt(0.0)

    def adapt(self, tokens_per_s: float) -> None:
        """Weigh the time of a copy against that of computing prompts, at `tokens_per_s`; 0: unknown.

        Spacings are a block times a power of two, so the multiples of a larger one are multiples of a smaller one.
        """
        copy_tokens = self._copy_s * tokens_per_s
        wanted = max(self._even, copy_tokens / _SHARE)
        self.spacing = self._size  # tokens
        while self.spacing < wanted:
            self.spacing *= 2
        self._least = _COPIES * copy_tokens  # tokens that a snapshot has to save

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._rows

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
        if request.narrows:
            end = min(end, request.n_shareable)
        positions = list(range((start // self.spacing + 1) * self.spacing, end + 1, self.spacing))
        last = min(len(request.token_ids) - 1, request.n_shareable) // self._size * self._size
        if start < last <= end and last % self.spacing > self._least:
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
        self.arrived(digest, written.row, written=bool(digest))

    # -- other places ------------------------------------------------------------------------------------------

    def hold(self, digest: bytes) -> int | None:
        """The row of a snapshot, which is not replaced until `release`; None if there is none."""
        row = self._rows.get(digest)
        if row is not None:
            self._holds[digest] += 1
        return row

    def release(self, digest: bytes) -> None:
        """End a hold."""
        self._holds[digest] -= 1
        self._holds += Counter()  # without those that are 0

    def expect(self, digest: bytes) -> int | None:
        """A row for a snapshot that comes from another place; None if it is here, or there is no row."""
        return None if digest in self._rows else self._take()

    def arrived(self, digest: bytes, row: int, *, written: bool) -> bool:
        """Let requests continue from a row that was taken, if it is written; returns whether they do."""
        if not written or digest in self._rows:
            self._free.append(row)
            return False
        self._rows[digest] = row
        self._places.saved(digest)
        return True

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        oldest = next((digest for digest in self._rows if not self._holds[digest]), None)
        return None if oldest is None else self._rows.pop(oldest)

    def _digest(self, request: Request, position: int) -> bytes:
        """The digest of the block that ends at `position`; empty while its tokens are not known."""
        index = position // self._size
        return next(iter(request.block_digests(self._size, index - 1, index)), b"")
