"""Orders to copy KV blocks between the ranks' caches and the staging area, and the ranks' answers, as flat int32.

order     kind, number, blocks
answer    kind, number

In a rank's staging area block i of an order starts at `i * block_bytes`; it holds the rank's part of all layers, in
order.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from services.worker.protocol.words import Kind, MalformedMessageError, Words

_HEADER = 2


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy `blocks` from the cache to the staging area if `out`, otherwise from the staging area to the cache."""

    number: int  # repeated in the answer; 31 bits
    out: bool
    blocks: Words  # [n]


def encode_order(number: int, out: bool, blocks: Sequence[int]) -> memoryview:
    """Return the order as bytes."""
    words = array("i", (Kind.COPY_OUT if out else Kind.COPY_IN, number))
    words.extend(blocks)
    return memoryview(words).cast("B")


def decode_order(words: Words) -> CopyOrder:
    """Inverse of `encode_order`. Raises MalformedMessageError."""
    if len(words) <= _HEADER or words[0] not in (Kind.COPY_OUT, Kind.COPY_IN):
        raise MalformedMessageError("not an order to copy blocks")
    return CopyOrder(int(words[1]), bool(words[0] == Kind.COPY_OUT), words[_HEADER:])


def encode_copied(number: int) -> memoryview:
    """Return a rank's answer to the order `number`."""
    return memoryview(array("i", (Kind.COPIED, number))).cast("B")
