"""Copies KV blocks between the server and the ranks through a staging area in shared memory, one order at a time.

A read returns the contents between the steps submitted before and after it, and no step sees a half-written block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from services.worker.protocol.order_codec import CopyOrder


class BlockCopies:
    """Copies for one group of ranks. `staging` holds every rank's area, `send` reaches all ranks."""

    def __init__(self, staging: Sequence[memoryview], send: Callable[[CopyOrder], asyncio.Future[str]]) -> None:
        self._staging, self._send = staging, send
        self._turn = asyncio.Lock()

    async def read(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """Contents of blocks; a block's contents are the ranks' parts of `block_bytes` bytes, concatenated.

        Raises RanksFailedError when the ranks are lost meanwhile.
        """
        await self._take_turn(len(blocks) * block_bytes)
        return await self._execute(CopyOrder(True, np.array(blocks, np.int32)), block_bytes)

    async def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Inverse of `read`. After a cancellation the blocks are untouched or are written before any later plan."""
        size = len(contents[0]) // len(self._staging)
        await self._take_turn(len(blocks) * size)
        for rank, area in enumerate(self._staging):
            for i, content in enumerate(contents):
                area[i * size : (i + 1) * size] = memoryview(content)[rank * size : (rank + 1) * size]
        await self._execute(CopyOrder(False, np.array(blocks, np.int32)), size)

    async def _take_turn(self, n_bytes: int) -> None:
        if n_bytes > len(self._staging[0]):
            raise ValueError(f"{n_bytes:,} bytes of KV blocks do not fit a staging area of {len(self._staging[0]):,}")
        await self._turn.acquire()

    async def _execute(self, order: CopyOrder, size: int) -> list[bytes]:
        """End the turn with an order; returns the contents of blocks copied out, of `size` bytes on a rank."""
        answer = self._send(order)
        try:
            refusal = await asyncio.shield(answer)
            assert not refusal, refusal
            blocks = range(len(order.blocks) if order.out else 0)
            return [b"".join(area[i * size : (i + 1) * size] for area in self._staging) for i in blocks]
        finally:  # the staging area is in use until the ranks have answered, even when the caller is cancelled
            answer.add_done_callback(lambda _: self._turn.release())
