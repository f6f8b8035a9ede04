"""A place of KV blocks below the pool: its books, and the verbs by which blocks come and go.

Look-ups count blocks whose contents are complete. A block is stored on top of its parent only, and leaves are evicted
before their parents, so the blocks of a place always form whole prefixes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.worker.engine.kv_events import Announcer, BlockPlace, KvEventLog
from services.worker.engine.state import PlaceTotals
from services.worker.kv_transfer.loader import Bandwidth
from services.worker.scheduling.places import BlockName


@dataclass(slots=True, eq=False)
class Entry:
    """A block in a place, or on its way there."""

    name: BlockName
    ready: bool = False  # its contents are complete
    holds: int = 0  # loads and stores in progress, during which it is not evicted
    children: set[bytes] = field(default_factory=set)


class BlockStore(ABC):
    """Blocks of one layout by digest, at most `limit_bytes` of them. All methods run on the event loop."""

    def __init__(
        self,
        place: BlockPlace,
        block_bytes: int,
        limit_bytes: int,
        events: KvEventLog,
        totals: PlaceTotals,
        speed: Bandwidth,
    ) -> None:
        """Raises ValueError if not a single block fits."""
        self.place, self.block_bytes, self.totals, self.speed = place, block_bytes, totals, speed
        self.capacity = limit_bytes // block_bytes  # blocks
        if not self.capacity:
            raise ValueError(f"{limit_bytes:,} bytes hold no KV block, which has {block_bytes:,}")
        totals.capacity_bytes = self.capacity * block_bytes
        self._announcer = Announcer(events, place)
        self._entries: dict[bytes, Entry] = {}  # the least recently used first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def lookup(self, digests: Iterable[bytes]) -> int:
        """Number of leading blocks that can be loaded."""
        n = 0
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None or not entry.ready:
                break
            n += 1
        return n

    def touch(self, digests: Sequence[bytes]) -> None:
        """Mark the blocks of a prefix as used now."""
        for digest in reversed(digests):
            if (entry := self._entries.pop(digest, None)) is not None:
                self._entries[digest] = entry

    def prepare_load(self, digests: Sequence[bytes]) -> list[Entry]:
        """Hold blocks that `lookup` counted until `complete_load`."""
        entries = [self._entries[digest] for digest in digests]
        for entry in entries:
            entry.holds += 1
        return entries

    def complete_load(self, entries: Sequence[Entry]) -> None:
        """Release blocks after a load."""
        for entry in entries:
            entry.holds -= 1

    def prepare_store(self, name: BlockName) -> bool:
        """Make room for a block, and reserve it until `complete_store`.

        False: the block is here already, its parent is not, or there is no room.
        """
        if name.digest in self._entries:
            self.touch((name.digest,))
            return False
        if name.parent and name.parent not in self._entries:
            return False
        self._insert(Entry(name, holds=1))
        if len(self._entries) > self.capacity and not self.evict(len(self._entries) - self.capacity):
            self.discard(name.digest)
            return False
        return True

    def complete_store(self, name: BlockName, *, stored: bool) -> None:
        """End a store; a block that was not stored is forgotten."""
        entry = self._entries.get(name.digest)
        if entry is None:  # discarded meanwhile, with a corrupt parent
            return
        entry.holds -= 1
        if stored:
            self._complete(entry)
            self.totals.stored_bytes += self.block_bytes
        else:
            self.discard(name.digest)

    def evict(self, n: int) -> bool:
        """Evict the `n` least recently used blocks without children and holds; returns whether there were as many."""
        for _ in range(len(self._entries)):
            if not n:
                break
            digest = next(iter(self._entries))
            entry = self._entries[digest]
            if entry.children or entry.holds:  # it is used later than it seems: by its children
                self._entries[digest] = self._entries.pop(digest)
                continue
            self.discard(digest)
            self.totals.evicted_blocks += 1
            n -= 1
        return not n

    def discard(self, digest: bytes) -> None:
        """Forget a block, and with it all that follow it."""
        entry = self._entries.get(digest)
        if entry is None:
            return
        if (parent := self._entries.get(entry.name.parent)) is not None:
            parent.children.discard(digest)
        gone = [entry]
        for each in gone:  # grows: parents before children
            gone += [self._entries[child] for child in each.children]
        for each in reversed(gone):
            del self._entries[each.name.digest]
            if each.ready:
                self._announcer.removed(each.name.hashes)
        self.totals.bytes = len(self._entries) * self.block_bytes
        self._remove([each.name.digest for each in gone])

    def clear(self) -> None:
        """Forget all blocks."""
        for entry in list(self._entries.values()):
            if entry.name.parent not in self._entries:
                self.discard(entry.name.digest)

    def hashes(self) -> list[int]:
        """Wire hashes of all complete blocks, parents before children."""
        roots = [entry for entry in self._entries.values() if entry.name.parent not in self._entries]
        for each in roots:  # grows
            roots += [self._entries[child] for child in each.children]
        return list(dict.fromkeys(value for entry in roots if entry.ready for value in entry.name.hashes))

    def restore(self, names: Iterable[BlockName]) -> list[bytes]:
        """Enter complete blocks, the least recently used first; returns digests of those without a parent or room."""
        known = {name.digest: name for name in names}
        for name in reversed(known.values()):
            chain = [name]  # its parents enter first
            while (parent := known.get(chain[-1].parent)) is not None and parent.digest not in self._entries:
                chain.append(parent)
            for each in reversed(chain):
                if each.digest in self._entries:
                    continue
                if (each.parent and each.parent not in self._entries) or len(self._entries) >= self.capacity:
                    break
                entry = Entry(each)
                self._insert(entry)
                self._complete(entry)
        self._entries = dict(reversed(self._entries.items()))
        return [digest for digest in known if digest not in self._entries]

    def _insert(self, entry: Entry) -> None:
        self._entries[entry.name.digest] = entry
        self.totals.bytes = len(self._entries) * self.block_bytes
        if (parent := self._entries.get(entry.name.parent)) is not None:
            parent.children.add(entry.name.digest)

    def _complete(self, entry: Entry) -> None:
        entry.ready = True
        self._announcer.stored(entry.name.hashes)

    @abstractmethod
    async def open(self) -> None:
        """Enter the blocks that an earlier process has left. Raises OSError."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what other processes could use."""

    @abstractmethod
    async def read(self, digests: Sequence[bytes]) -> Sequence[bytes | None]:
        """Contents of held blocks in order; they end with None for one that is missing or damaged."""

    @abstractmethod
    async def write(self, names: Sequence[BlockName], contents: Sequence[bytes]) -> None:
        """Write the contents of prepared blocks. Raises OSError; some of them may be written then."""

    @abstractmethod
    def _remove(self, digests: Sequence[bytes]) -> None:
        """Delete contents; those of blocks that are not complete may not be there."""
