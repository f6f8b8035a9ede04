"""Flat int32 messages: the kinds, and helpers for floats and 64-bit numbers in 32-bit words."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.int32]

_LOW = 0xFFFFFFFF


class Kind(IntEnum):
    """The first word of every message."""

    PLAN = 1
    STOP = 2
    RESULT = 3
    STARTED = 4
    ERROR = 5
    COPY_OUT = 6
    COPY_IN = 7
    ADAPTER = 8
    ANSWER = 9
    SLEEP = 10
    WAKE = 11
    WARMING = 12
    STATE_OUT = 13
    STATE_IN = 14


class MalformedMessageError(ValueError):
    """A message does not match its header."""


def split64(value: int) -> tuple[int, int]:
    """Return the low and the high half of a 64-bit number as signed 32-bit words."""
    low, high = value & _LOW, (value >> 32) & _LOW
    return low - ((low >> 31) << 32), high - ((high >> 31) << 32)


def join64(low: int, high: int) -> int:
    """Inverse of `split64`; the result is unsigned."""
    return (int(low) & _LOW) | ((int(high) & _LOW) << 32)


def float_words(values: Sequence[float]) -> list[int]:
    """Return the bits of float32 `values`."""
    return array("i", array("f", values).tobytes()).tolist()


def words_float(words: Words) -> list[float]:
    """Inverse of `float_words`."""
    values: list[float] = words.view(np.float32).tolist()
    return values


def data_words(data: bytes) -> list[int]:
    """Return the length of `data` in bytes, then the bytes, padded to whole words."""
    return [len(data), *array("i", data + bytes(-len(data) % 4))]


def text_words(text: str) -> list[int]:
    """Return the words of a text in UTF-8."""
    return data_words(text.encode())


def read_words(message: bytes | bytearray | memoryview) -> Words:
    """View a message as words."""
    if len(message) % 4 or len(message) < 4:
        raise MalformedMessageError(f"a message of {len(message)} bytes is not made of 32-bit words")
    return np.frombuffer(message, dtype=np.int32)


class WordCursor:
    """Reads a message front to back and refuses to read past its end."""

    def __init__(self, words: Words, at: int = 0) -> None:
        self._words = words
        self._at = at

    def take(self, count: int) -> Words:
        """Return the next `count` words, without copying."""
        end = self._at + count
        if count < 0 or end > len(self._words):
            raise MalformedMessageError(f"{count} words wanted at {self._at} of {len(self._words)}")
        taken = self._words[self._at : end]
        self._at = end
        return taken

    def take_data(self) -> bytes:
        """Return the next bytes, as `data_words` wrote them."""
        size = int(self.take(1)[0])
        return self.take(-(-size // 4)).tobytes()[:size]

    def take_text(self) -> str:
        """Return the next text, as `text_words` wrote it."""
        return self.take_data().decode()

    def finish(self) -> None:
        """Raise MalformedMessageError unless everything was read."""
        if self._at != len(self._words):
            raise MalformedMessageError(f"{len(self._words) - self._at} words too many")
