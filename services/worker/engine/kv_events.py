"""Numbered changes of the prefix cache, for a coordinator."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ryzanstein.v1 import worker_pb2 as pb


class BlockPlace(StrEnum):
    """Where a worker keeps KV blocks, fastest first."""

    DEVICE = "device"  # the pool, from which steps read
    HOST = "host"
    DISK = "disk"


PLACES = {BlockPlace.DEVICE: pb.KV_PLACE_DEVICE, BlockPlace.HOST: pb.KV_PLACE_HOST, BlockPlace.DISK: pb.KV_PLACE_DISK}


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change of a place in 64-bit wire hashes; exactly one of the first three fields is set."""

    stored: tuple[int, ...] = ()  # parents before children
    removed: tuple[int, ...] = ()  # children before parents
    cleared: bool = False  # device only
    place: BlockPlace = BlockPlace.DEVICE


class KvEventLog:
    """Collects changes and keeps the newest `capacity` events for replay.

    Changes of the same kind are merged until `flush` gives them a sequence number, so a step makes one or two
    events for any number of blocks.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._events: deque[KvEvent] = deque(maxlen=capacity)
        self._next_seq = 0
        self._open: list[int] = []
        self._kind = (True, BlockPlace.DEVICE)  # whether the open changes are stored blocks, and their place

    @property
    def next_seq(self) -> int:
        """The sequence number of the next event."""
        return self._next_seq

    @property
    def first_seq(self) -> int:
        """The sequence number of the oldest event in the log; `next_seq` when the log is empty."""
        return self._next_seq - len(self._events)

    def stored(self, hashes: Sequence[int], place: BlockPlace = BlockPlace.DEVICE) -> None:
        """A block became reusable."""
        self._collect(hashes, (True, place))

    def removed(self, hashes: Sequence[int], place: BlockPlace = BlockPlace.DEVICE) -> None:
        """A block was evicted; `hashes` are in the order of its tokens."""
        self._collect(hashes[::-1], (False, place))

    def cleared(self) -> None:
        """All blocks on the device were lost."""
        if self._kind[1] is BlockPlace.DEVICE:
            self._open.clear()  # these changes were never announced
        self.flush()
        self._append(KvEvent(cleared=True))

    def flush(self) -> bool:
        """Number the collected changes; returns whether there were any."""
        if not self._open:
            return False
        hashes, (stored, place) = tuple(self._open), self._kind
        self._open.clear()
        self._append(KvEvent(stored=hashes, place=place) if stored else KvEvent(removed=hashes, place=place))
        return True

    def since(self, seq: int) -> list[KvEvent] | None:
        """Events from `seq` on; None when the log has dropped some of them or `seq` is in the future."""
        if not self.first_seq <= seq <= self._next_seq:
            return None
        held = len(self._events)
        return [self._events[i] for i in range(held - (self._next_seq - seq), held)]

    def _collect(self, hashes: Sequence[int], kind: tuple[bool, BlockPlace]) -> None:
        if self._kind != kind:
            self.flush()
            self._kind = kind
        self._open.extend(hashes)

    def _append(self, event: KvEvent) -> None:
        self._events.append(event)
        self._next_seq += 1


class Announcer:
    """Announces the blocks of one place. Blocks wider than a hash block can share hashes; each is announced once."""

    def __init__(self, log: KvEventLog, place: BlockPlace = BlockPlace.DEVICE) -> None:
        self._log, self._place = log, place
        self._copies: Counter[int] = Counter()

    def stored(self, hashes: Sequence[int]) -> None:
        """A block of these hashes is in the place."""
        self._log.stored([value for value in hashes if not self._copies[value]], self._place)
        self._copies.update(hashes)

    def removed(self, hashes: Sequence[int]) -> None:
        """A block of these hashes has left the place."""
        self._copies.subtract(hashes)
        gone = [value for value in hashes if not self._copies[value]]
        self._log.removed(gone, self._place)
        for value in gone:
            del self._copies[value]
