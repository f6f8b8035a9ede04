"""Orders to all ranks, which execute them between two steps, and the ranks' answers, as flat int32.

order     kind, number, then for a copy: blocks; for a state: row, start, size; for an adapter: slot, keep, folder
          (text), digest (text), n_forget, their digests (texts); for a sleep: level; for a wake: nothing
answer    kind, number, error (text; empty: executed)

In a rank's staging area block i of a copy starts at `i * block_bytes`; it holds the rank's part of all layers, in
order. Bytes of a state start at 0.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from services.worker.protocol.words import Kind, MalformedMessageError, WordCursor, Words, text_words

ORDER_KINDS = (
    *(Kind.COPY_OUT, Kind.COPY_IN, Kind.STATE_OUT, Kind.STATE_IN),
    *(Kind.ADAPTER, Kind.SLEEP, Kind.WAKE),
)


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """Copy `blocks` from the cache to the staging area if `out`, otherwise from the staging area to the cache."""

    out: bool
    blocks: Words  # [n]


@dataclass(frozen=True, slots=True)
class StateOrder:
    """Copy bytes [start, start + size) of a row of the states, over all layers, to the staging area if `out`."""

    out: bool
    row: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class AdapterOrder:
    """Load an adapter into `slot`, in place of another one."""

    slot: int
    folder: str  # empty: the ranks have the adapter in memory
    digest: str = ""
    keep: bool = False  # keep it in memory, whatever happens to the slot
    forget: tuple[str, ...] = ()  # digests of adapters that need not stay in memory, before the load


@dataclass(frozen=True, slots=True)
class SleepOrder:
    """Give weights, KV cache and graphs back. Level 2 keeps no copies of the weights."""

    level: int


@dataclass(frozen=True, slots=True)
class WakeOrder:
    """Rebuild what a sleep gave back."""


Order = CopyOrder | StateOrder | AdapterOrder | SleepOrder | WakeOrder


def encode_order(number: int, order: Order) -> memoryview:
    """Return the order as bytes; the answers repeat its `number`, of 31 bits."""
    match order:
        case CopyOrder(out, blocks):
            words = [Kind.COPY_OUT if out else Kind.COPY_IN, number, *blocks.tolist()]
        case StateOrder(out, row, start, size):
            words = [Kind.STATE_OUT if out else Kind.STATE_IN, number, row, start, size]
        case SleepOrder(level):
            words = [Kind.SLEEP, number, level]
        case WakeOrder():
            words = [Kind.WAKE, number]
        case AdapterOrder(slot, folder, digest, keep, forget):
            words = [Kind.ADAPTER, number, slot, keep, *text_words(folder), *text_words(digest), len(forget)]
            for forgotten in forget:
                words += text_words(forgotten)
    return memoryview(array("i", words)).cast("B")


def decode_order(words: Words) -> tuple[int, Order]:
    """Inverse of `encode_order`. Raises MalformedMessageError."""
    cursor = WordCursor(words)
    kind, number = cursor.take(2).tolist()
    if kind not in ORDER_KINDS:
        raise MalformedMessageError("not an order")
    if kind in (Kind.COPY_OUT, Kind.COPY_IN):
        return number, CopyOrder(kind == Kind.COPY_OUT, words[2:])
    if kind != Kind.ADAPTER:
        order = _decode_short(kind, cursor)
        cursor.finish()
        return number, order
    slot, keep = cursor.take(2).tolist()
    folder, digest = cursor.take_text(), cursor.take_text()
    forget = tuple(cursor.take_text() for _ in range(int(cursor.take(1)[0])))
    cursor.finish()
    return number, AdapterOrder(slot, folder, digest, bool(keep), forget)


def _decode_short(kind: int, cursor: WordCursor) -> Order:
    if kind in (Kind.STATE_OUT, Kind.STATE_IN):
        row, start, size = cursor.take(3).tolist()
        return StateOrder(kind == Kind.STATE_OUT, row, start, size)
    return SleepOrder(int(cursor.take(1)[0])) if kind == Kind.SLEEP else WakeOrder()


def encode_answer(number: int, error: str) -> memoryview:
    """Return a rank's answer to the order `number` as bytes."""
    return memoryview(array("i", (Kind.ANSWER, number, *text_words(error)))).cast("B")


def decode_answer(words: Words) -> tuple[int, str]:
    """Return the number of the order and the error. Raises MalformedMessageError."""
    if words[0] != Kind.ANSWER:
        raise MalformedMessageError("not an answer to an order")
    cursor = WordCursor(words, 1)
    number, error = int(cursor.take(1)[0]), cursor.take_text()
    cursor.finish()
    return number, error
