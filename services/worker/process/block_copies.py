"""Copies KV blocks and states between the server and the ranks through a staging area in shared memory.

One order at a time.

A read returns the contents between the steps submitted before and after it, and no step sees a half-written block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from services.worker.protocol.order_codec import CopyOrder, StateOrder


class BlockCopies:
    """Copies for one group of ranks. `staging` holds every rank's area, `send` reaches all ranks."""

    def __init__(
        self, staging: Sequence[memoryview], send: Callable[[CopyOrder | StateOrder], asyncio.Future[str]]
    ) -> None:
        self._staging, self._send = staging, send
        self._turn = asyncio.Lock()

    async def read(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """Contents of blocks; a block's contents are the ranks' parts of `block_bytes` bytes, concatenated.

        Raises RanksFailedError when the ranks are lost meanwhile.
        """
        await self._take_turn(len(blocks) * block_bytes)

        def contents() -> list[bytes]:
            places = [slice(i * block_bytes, (i + 1) * block_bytes) for i in range(len(blocks))]
            return [b"".join(area[place] for area in self._staging) for place in places]

        return await self._execute(CopyOrder(True, np.array(blocks, np.int32)), contents)

    async def write(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Inverse of `read`. After a cancellation the blocks are untouched or are written before any later plan."""
        size = len(contents[0]) // len(self._staging)
        await self._take_turn(len(blocks) * size)
        for rank, area in enumerate(self._staging):
            for i, content in enumerate(contents):
                area[i * size : (i + 1) * size] = memoryview(content)[rank * size : (rank + 1) * size]
        await self._execute(CopyOrder(False, np.array(blocks, np.int32)))

    async def read_state(self, row: int, n_bytes: int) -> bytes:
        """A state, the ranks' parts of `n_bytes` bytes, concatenated. The caller sees that no plan changes its row.

        A large one is copied in pieces, with steps between them.
        """
        pieces: list[list[bytes]] = []  # for each order those by rank
        for start in range(0, n_bytes, len(self._staging[0])):
            size = min(n_bytes - start, len(self._staging[0]))
            await self._take_turn(size)
            order, of_ranks = StateOrder(True, row, start, size), [area[:size] for area in self._staging]
            pieces.append(await self._execute(order, partial(list, map(bytes, of_ranks))))
        return b"".join(piece for of_rank in zip(*pieces, strict=True) for piece in of_rank)

    async def write_state(self, row: int, content: bytes) -> None:
        """Inverse of `read_state`, for a row that no plan reads before the end."""
        n_bytes = len(content) // len(self._staging)
        for start in range(0, n_bytes, len(self._staging[0])):
            size = min(n_bytes - start, len(self._staging[0]))
            await self._take_turn(size)
            for rank, area in enumerate(self._staging):
                area[:size] = memoryview(content)[rank * n_bytes + start :][:size]
            await self._execute(StateOrder(False, row, start, size))

    async def _take_turn(self, n_bytes: int) -> None:
        if n_bytes > len(self._staging[0]):
            raise ValueError(f"{n_bytes:,} bytes of KV blocks do not fit a staging area of {len(self._staging[0]):,}")
        await self._turn.acquire()

    async def _execute(self, order: CopyOrder | StateOrder, contents: Callable[[], list[bytes]] = list) -> list[bytes]:
        """End the turn with an order; returns `contents` of the staging areas, once all ranks have executed it."""
        answer = self._send(order)
        try:
            refusal = await asyncio.shield(answer)
            assert not refusal, refusal
            return contents()
        finally:  # the staging area is in use until the ranks have answered, even when the caller is cancelled
            answer.add_done_callback(lambda _: self._turn.release())
