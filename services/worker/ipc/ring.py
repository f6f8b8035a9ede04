"""A ring of variable-size messages in shared memory: one producer, several readers; each reader sees all messages.

Layout: the write cursor and one cursor per reader, each on a cache line of its own, then the data. Cursors
count bytes since the beginning and are multiples of the frame alignment. A frame is (sequence, length) and the
payload. A frame never wraps: when it does not fit before the end, a skip frame fills the rest.

    reader cursor <= write cursor <= slowest reader cursor + capacity
"""

from __future__ import annotations

import struct

from services.compute.ranks.futex import Counter, Patience
from services.compute.ranks.segment import Segment

_LINE = 64
_ALIGN = 16
_FRAME = struct.Struct("<QQ")  # sequence, payload bytes
_SKIP = 0xFFFFFFFFFFFFFFFF


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def ring_bytes(capacity: int, readers: int) -> int:
    """Bytes of shared memory for a ring of `capacity` data bytes."""
    return _LINE * (1 + readers) + _aligned(capacity)


class RingCorruptedError(RuntimeError):
    """A frame does not carry the expected sequence number."""


class _Ring:
    def __init__(self, segment: Segment, offset: int, capacity: int, readers: int) -> None:
        self._segment = segment
        self._capacity = _aligned(capacity)
        self._data = offset + _LINE * (1 + readers)
        assert self._data + self._capacity <= segment.size
        self._written = Counter(segment, offset)
        self._read = [Counter(segment, offset + _LINE * (1 + i)) for i in range(readers)]
        self._cursor = 0
        self._sequence = 0


class RingWriter(_Ring):
    """The producer's end; a ring has exactly one during its whole life."""

    @property
    def largest_message(self) -> int:
        """Size in bytes that fits at any cursor position once the readers have caught up."""
        return self._capacity // 2 - _FRAME.size - _ALIGN

    def try_write(self, payload: memoryview | bytes) -> bool:
        """Append a message; returns False while the ring has no room for it.

        Raises ValueError for a message larger than `largest_message`, which might never fit.
        """
        size = len(payload)
        if size > self.largest_message:
            raise ValueError(f"a message of {size} bytes exceeds the ring's limit of {self.largest_message}")
        frame = _FRAME.size + _aligned(size)
        at = self._cursor % self._capacity
        skip = self._capacity - at if at + frame > self._capacity else 0
        slowest = min(reader.load() for reader in self._read)
        if self._cursor + skip + frame - slowest > self._capacity:
            return False
        if skip:
            _FRAME.pack_into(self._segment.view, self._data + at, self._sequence, _SKIP)
            at = 0
        start = self._data + at
        _FRAME.pack_into(self._segment.view, start, self._sequence, size)
        start += _FRAME.size
        self._segment.view[start : start + size] = payload
        self._sequence += 1
        self._cursor += skip + frame
        self._written.store(self._cursor)
        return True


class RingReader(_Ring):
    """One reader's end; `index` selects its cursor."""

    def __init__(self, segment: Segment, offset: int, capacity: int, readers: int, index: int) -> None:
        super().__init__(segment, offset, capacity, readers)
        self._mine = self._read[index]

    def wait(self, timeout_s: float, patience: Patience) -> bool:
        """Wait until there is a message; False after `timeout_s` seconds."""
        return self._written.wait_reach(self._cursor + 1, timeout_s, patience)

    def try_read(self) -> bytearray | None:
        """Take the next message; None when there is none. Raises RingCorruptedError."""
        if self._written.load() <= self._cursor:
            return None
        view = self._segment.view
        at = self._cursor % self._capacity
        sequence, size = _FRAME.unpack_from(view, self._data + at)
        if size == _SKIP:
            self._cursor += self._capacity - at
            at = 0
            sequence, size = _FRAME.unpack_from(view, self._data)
        if sequence != self._sequence or size > self._capacity:
            raise RingCorruptedError(f"frame {sequence} of {size} bytes where frame {self._sequence} must be")
        start = self._data + at + _FRAME.size
        message = bytearray(view[start : start + size])
        self._sequence += 1
        self._cursor += _FRAME.size + _aligned(size)
        self._mine.write(self._cursor)
        return message
