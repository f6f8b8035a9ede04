"""Orders to load an adapter into a slot of the ranks, and the ranks' answers, as flat int32.

order     kind, number, slot, keep, folder (text), digest (text), n_forget, their digests (texts)
answer    kind, number, error (text; empty: loaded)
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from services.worker.protocol.words import Kind, MalformedMessageError, WordCursor, Words, text_words

_HEADER = 4


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Load an adapter into `slot`, in place of another one."""

    slot: int
    folder: str  # empty: the ranks have the adapter in memory
    digest: str = ""
    keep: bool = False  # keep it in memory, whatever happens to the slot
    forget: tuple[str, ...] = ()  # digests of adapters that need not stay in memory, before the load
    number: int = 0  # repeated in the answer; 31 bits


def encode_adapter(order: AdapterOrder) -> memoryview:
    """Return the order as bytes."""
    words = [Kind.ADAPTER, order.number, order.slot, order.keep, *text_words(order.folder), *text_words(order.digest)]
    words.append(len(order.forget))
    for digest in order.forget:
        words += text_words(digest)
    return memoryview(array("i", words)).cast("B")


def decode_adapter(words: Words) -> AdapterOrder:
    """Inverse of `encode_adapter`. Raises MalformedMessageError."""
    if len(words) <= _HEADER or words[0] != Kind.ADAPTER:
        raise MalformedMessageError("not an order to load an adapter")
    cursor = WordCursor(words, _HEADER)
    folder, digest = cursor.take_text(), cursor.take_text()
    forget = tuple(cursor.take_text() for _ in range(int(cursor.take(1)[0])))
    cursor.finish()
    return AdapterOrder(int(words[2]), folder, digest, bool(words[3]), forget, int(words[1]))


def encode_adapted(number: int, error: str) -> memoryview:
    """Return a rank's answer to the order `number`."""
    return memoryview(array("i", (Kind.ADAPTED, number, *text_words(error)))).cast("B")


def decode_adapted(words: Words) -> tuple[int, str]:
    """Return the number of the order and the error of an answer."""
    return int(words[1]), WordCursor(words, 2).take_text()
