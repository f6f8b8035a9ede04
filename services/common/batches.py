"""What waits at the same time travels in one message: the busier both sides are, the less each of their items costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol, TypeVar

MAX_BATCH = 32
# Far from the largest message that gRPC lets through, also with one item more.
MAX_BATCH_BYTES = 1024 * 1024


class Sized(Protocol):
    """A protobuf message."""

    def ByteSize(self) -> int:  # noqa: N802
        """How many bytes it has on the wire."""


T = TypeVar("T", bound=Sized)


async def batches(queue: asyncio.Queue[T | None]) -> AsyncIterator[list[T]]:
    """What waits in the queue whenever anything does, up to a None.

    At most `MAX_BATCH` at once, and none more after `MAX_BATCH_BYTES`.
    """
    item = await queue.get()
    while item is not None:
        batch, n_bytes = [item], item.ByteSize()
        while len(batch) < MAX_BATCH and n_bytes < MAX_BATCH_BYTES and not queue.empty():
            if (item := queue.get_nowait()) is None:
                break
            batch.append(item)
            n_bytes += item.ByteSize()
        yield batch
        item = await queue.get() if item is not None else None
