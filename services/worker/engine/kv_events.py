"""Numbered changes of the prefix cache, for a coordinator."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change of the cache in 64-bit wire hashes; exactly one of the fields is set."""

    stored: tuple[int, ...] = ()  # parents before children
    removed: tuple[int, ...] = ()  # children before parents
    cleared: bool = False


class KvEventLog:
    """Collects changes and keeps the newest `capacity` events for replay.

    Changes of the same kind are merged until `flush` gives them a sequence number, so a step makes one or two
    events for any number of blocks.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._events: deque[KvEvent] = deque(maxlen=capacity)
        self._next_seq = 0
        self._open: list[int] = []
        self._open_stored = True

    @property
    def next_seq(self) -> int:
        """The sequence number of the next event."""
        return self._next_seq

    @property
    def first_seq(self) -> int:
        """The sequence number of the oldest event in the log; `next_seq` when the log is empty."""
        return self._next_seq - len(self._events)

    def stored(self, hashes: Sequence[int]) -> None:
        """A block became reusable."""
        self._collect(hashes, stored=True)

    def removed(self, hashes: Sequence[int]) -> None:
        """A block was evicted; `hashes` are in the order of its tokens."""
        self._collect(hashes[::-1], stored=False)

    def cleared(self) -> None:
        """The whole cache was lost."""
        self._open.clear()  # these changes were never announced
        self._append(KvEvent(cleared=True))

    def flush(self) -> bool:
        """Number the collected changes; returns whether there were any."""
        if not self._open:
            return False
        hashes = tuple(self._open)
        self._open.clear()
        self._append(KvEvent(stored=hashes) if self._open_stored else KvEvent(removed=hashes))
        return True

    def since(self, seq: int) -> list[KvEvent] | None:
        """Events from `seq` on; None when the log has dropped some of them or `seq` is in the future."""
        if not self.first_seq <= seq <= self._next_seq:
            return None
        held = len(self._events)
        return [self._events[i] for i in range(held - (self._next_seq - seq), held)]

    def _collect(self, hashes: Sequence[int], *, stored: bool) -> None:
        if self._open_stored != stored:
            self.flush()
            self._open_stored = stored
        self._open.extend(hashes)

    def _append(self, event: KvEvent) -> None:
        self._events.append(event)
        self._next_seq += 1
