"""States of a place below the pool: snapshots that are copied there over some time, and brought back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from services.worker.scheduling.request import Request
from services.worker.scheduling.snapshots import Snapshots

if TYPE_CHECKING:
    from tests.unit.worker.scheduling.harness import Harness
    from tests.unit.worker.scheduling.kept_blocks import KeptBlocks


class KeptStates:
    """A place for any number of states. No other state takes a row during a copy from it, or to it."""

    def __init__(self, blocks: KeptBlocks) -> None:
        self._blocks = blocks
        self.pending: dict[bytes, None] = {}  # by the block at whose end they are
        self.contents: dict[bytes, int] = {}
        self.n_loaded = 0
        self._copying: tuple[bytes, int, int] | None = None  # with the row, and its contents at the beginning
        self._arriving: dict[Request, tuple[bytes, int]] = {}

    @property
    def _harness(self) -> Harness:
        assert self._blocks.harness is not None
        return self._blocks.harness

    @property
    def _snapshots(self) -> Snapshots:
        snapshots = self._harness.scheduler.transfers.snapshots
        assert snapshots is not None
        return snapshots

    @property
    def busy(self) -> bool:
        return bool(self.pending or self._copying)

    def copy(self) -> None:
        """A copy ends or begins."""
        if self._copying is not None:
            digest, row, content = self._copying
            assert self._harness.ranks.states[row] == content, "a row was overwritten while it was copied"
            self.contents[digest], self._copying = content, None
            self._snapshots.release(digest)
            return
        digest = next(iter(self.pending))
        del self.pending[digest]
        if (row := self._snapshots.hold(digest)) is not None:
            self._copying = digest, row, self._harness.ranks.states[row]

    def last(self, digests: Sequence[bytes], first: int) -> tuple[int, bool]:
        """Number of leading blocks that end in a state, more than `first`, and whether the device lacks the state."""
        for end in range(len(digests), first, -1):
            if digests[end - 1] in self._snapshots:
                return end, False
            if digests[end - 1] in self.contents:
                return end, True
        return first, False

    def expect(self, request: Request, digest: bytes) -> None:
        """A state is going to arrive for a request, if there is a row for it."""
        if (row := self._snapshots.expect(digest)) is not None:
            self._arriving[request] = digest, row

    def arrive(self, request: Request, *, whole: bool) -> None:
        """A request's load ends, with its state if all blocks have come."""
        if request not in self._arriving:
            return
        digest, row = self._arriving.pop(request)
        if whole:
            self._harness.ranks.states[row] = self.contents[digest]
        self.n_loaded += self._snapshots.arrived(digest, row, written=whole)
