"""Sends waiting items together in one message, which makes each item cheaper the busier both sides are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

MAX_BATCH = 32
# Far below the largest message that gRPC allows, even with one more item.
MAX_BATCH_BYTES = 1024 * 1024


class Sized(Protocol):
    """A protobuf message."""

    def ByteSize(self) -> int:  # noqa: N802
        """Its size on the wire, in bytes."""


T = TypeVar("T", bound=Sized)


async def batches(queue: asyncio.Queue[T | None]) -> AsyncIterator[list[T]]:
    """Yield the waiting items of the queue as batches, until a None.

    A batch ends at `MAX_BATCH` items, or with the item that reaches `MAX_BATCH_BYTES`.
    """
    item = await queue.get()
    while item is not None:
        batch, n_bytes = [item], 0
        while len(batch) < MAX_BATCH and not queue.empty():
            n_bytes += batch[-1].ByteSize()  # it costs as much as to serialize; a single item is not measured
            if n_bytes >= MAX_BATCH_BYTES or (item := queue.get_nowait()) is None:
                break
            batch.append(item)
        yield batch
        item = await queue.get() if item is not None else None
