"""KV blocks in the memory of the server process."""

from __future__ import annotations

from collections.abc import Sequence

from services.worker.engine.kv_events import BlockPlace, KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.block_store import BlockStore
from services.worker.kv_transfer.loader import Bandwidth
from services.worker.scheduling.places import BlockName

ASSUMED_BYTES_PER_S = 2e9  # before the first load


class HostStore(BlockStore):
    """Blocks that are lost with the process."""

    def __init__(self, block_bytes: int, limit_bytes: int, events: KvEventLog, totals: PlaceTotals) -> None:
        """Raises ValueError if not a single block fits."""
        super().__init__(BlockPlace.HOST, block_bytes, limit_bytes, events, totals, Bandwidth(ASSUMED_BYTES_PER_S))
        self._contents: dict[bytes, bytes] = {}

    async def open(self) -> None:
        """An earlier process has left none."""

    def close(self) -> None:
        """The blocks end with the process."""

    async def read(self, digests: Sequence[bytes]) -> list[bytes | None]:
        """Contents of held blocks."""
        return [self._contents.get(digest) for digest in digests]

    async def write(self, names: Sequence[BlockName], contents: Sequence[bytes]) -> None:
        """Keep the contents."""
        self._contents.update((name.digest, content) for name, content in zip(names, contents, strict=True))

    def _remove(self, digests: Sequence[bytes]) -> None:
        for digest in digests:
            self._contents.pop(digest, None)
