"""Orders to load an adapter into a slot of the ranks, and the ranks' answers, as flat int32.

order     kind, number, slot, folder (text)
answer    kind, number, error (text; empty: loaded)
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from services.worker.protocol.words import Kind, MalformedMessageError, WordCursor, Words, text_words

_HEADER = 3


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Load the adapter in `folder` into `slot`, in place of another one."""

    number: int  # repeated in the answer; 31 bits
    slot: int
    folder: str


def encode_adapter(order: AdapterOrder) -> memoryview:
    """Return the order as bytes."""
    return memoryview(array("i", (Kind.ADAPTER, order.number, order.slot, *text_words(order.folder)))).cast("B")


def decode_adapter(words: Words) -> AdapterOrder:
    """Inverse of `encode_adapter`. Raises MalformedMessageError."""
    if len(words) <= _HEADER or words[0] != Kind.ADAPTER:
        raise MalformedMessageError("not an order to load an adapter")
    cursor = WordCursor(words, _HEADER)
    folder = cursor.take_text()
    cursor.finish()
    return AdapterOrder(int(words[1]), int(words[2]), folder)


def encode_adapted(number: int, error: str) -> memoryview:
    """Return a rank's answer to the order `number`."""
    return memoryview(array("i", (Kind.ADAPTED, number, *text_words(error)))).cast("B")


def decode_adapted(words: Words) -> tuple[int, str]:
    """Return the number of the order and the error of an answer."""
    return int(words[1]), WordCursor(words, 2).take_text()
