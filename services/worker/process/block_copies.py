"""Copies KV blocks between the server and the ranks through a staging area in shared memory, one order at a time.

Orders travel in the ring of the plans, so the ranks execute them between the steps submitted before and after them:
a read returns the contents of that moment, and no later step sees a half-written block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.worker.protocol.copy_codec import encode_order

_NUMBERS = 1 << 31


@dataclass(slots=True)
class _Order:
    number: int
    n_blocks: int
    block_bytes: int  # on one rank
    out: bool
    waiting: set[int]  # ranks
    done: asyncio.Future[list[bytes]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class BlockCopies:
    """Copies for one group of ranks. `staging` holds every rank's area, `send` reaches all ranks."""

    def __init__(self, staging: Sequence[memoryview], send: Callable[[memoryview], None]) -> None:
        self._staging = staging
        self._send = send
        self._turn = asyncio.Lock()
        self._order: _Order | None = None
        self._number = 0
        self._error: Exception | None = None

    async def read(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """Contents of blocks; a block's contents are the ranks' parts of `block_bytes` bytes, concatenated.

        Raises RanksFailedError when the ranks are lost meanwhile.
        """
        self._require_room(len(blocks) * block_bytes)
        await self._take_turn()
        return await self._give(blocks, block_bytes, out=True)

    async def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Inverse of `read`. After a cancellation the blocks are untouched or are written before any later plan."""
        size = len(contents[0]) // len(self._staging)
        self._require_room(len(blocks) * size)
        await self._take_turn()
        for rank, area in enumerate(self._staging):
            for i, content in enumerate(contents):
                area[i * size : (i + 1) * size] = memoryview(content)[rank * size : (rank + 1) * size]
        await self._give(blocks, size, out=False)

    def answered(self, rank: int, number: int) -> None:
        """Record that a rank has executed an order."""
        order = self._order
        if order is None or number != order.number:
            raise ValueError(f"rank {rank} answers an order to copy that was not given: {number}")
        order.waiting.discard(rank)
        if not order.waiting:
            self._end(order, None)

    def fail(self, error: Exception) -> None:
        """End the order in progress and all later ones with `error`, because the ranks are gone."""
        self._error = error
        if self._order is not None:
            self._end(self._order, error)

    def _require_room(self, n_bytes: int) -> None:
        if n_bytes > len(self._staging[0]):
            raise ValueError(f"{n_bytes:,} bytes of KV blocks do not fit a staging area of {len(self._staging[0]):,}")

    async def _take_turn(self) -> None:
        await self._turn.acquire()
        if self._error is not None:
            self._turn.release()
            raise self._error

    async def _give(self, blocks: Sequence[int], block_bytes: int, *, out: bool) -> list[bytes]:
        self._number = (self._number + 1) % _NUMBERS
        order = self._order = _Order(self._number, len(blocks), block_bytes, out, set(range(len(self._staging))))
        self._send(encode_order(order.number, out, blocks))
        # Shielded: the staging area is in use until the ranks have answered, even when the caller is cancelled.
        return await asyncio.shield(order.done)

    def _end(self, order: _Order, error: Exception | None) -> None:
        self._order = None
        if error is None:
            order.done.set_result(self._collect(order) if order.out else [])
        else:
            order.done.set_exception(error)
            order.done.exception()  # marks it as retrieved, because the caller may have been cancelled
        self._turn.release()

    def _collect(self, order: _Order) -> list[bytes]:
        size = order.block_bytes
        return [b"".join(area[i * size : (i + 1) * size] for area in self._staging) for i in range(order.n_blocks)]
