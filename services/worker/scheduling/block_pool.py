"""Ref-counted KV blocks; published blocks without references form the prefix cache.

A block is in one of three places:

    blank    holds nothing worth keeping               -> handed out first
    cached   published, without references             -> the LRU; its head is evicted when no block is blank
    used     referenced by one or more block tables

A published block is *canonical* for its digest: requests with the same prefix share it. A request references whole
prefixes and releases children first, and a block is only published on top of a canonical parent, so

    child used  => parent used        and        child cached => parent used, or behind it in the LRU.

Eviction from the head therefore removes leaves first, and the cached blocks always form whole prefixes. The pool says
to other places which blocks it publishes and evicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from services.worker.engine.kv_events import Announcer, KvEventLog
from services.worker.scheduling.places import DEVICE_ONLY, BlockName, Places

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 .. `n_blocks` of `block_tokens` positions each, a multiple of those of a hash block.

    Block 0 is null and never handed out.
    """

    def __init__(self, n_blocks: int, block_tokens: int, events: KvEventLog, places: Places = DEVICE_ONLY) -> None:
        self.total = n_blocks
        self.block_tokens = block_tokens
        self._announcer = Announcer(events)
        self._places = places
        self._references = [0] * (n_blocks + 1)
        self._blank = list(range(n_blocks, 0, -1))
        self._lru: dict[int, None] = {}  # insertion order: the next to evict comes first
        self._canonical: dict[bytes, int] = {}  # digest -> block; parents were inserted before their children
        self._digests: list[bytes | None] = [None] * (n_blocks + 1)  # digests of canonical blocks
        self._hashes: list[tuple[int, ...]] = [()] * (n_blocks + 1)  # wire hashes of canonical blocks

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can hand out: blank and cached ones."""
        return len(self._blank) + len(self._lru)

    @property
    def cached(self) -> int:
        """Number of reusable blocks without references."""
        return len(self._lru)

    @property
    def used(self) -> int:
        """Number of blocks with references."""
        return self.total - self.available

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._canonical

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """The longest cached prefix of a chain of block digests, as blocks; references nothing."""
        blocks = []
        for digest in digests:
            block = self._canonical.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """Number of `blocks` without references: `share` takes that many out of `available`."""
        return sum(1 for block in blocks if self._references[block] == 0)

    def share(self, blocks: Sequence[int]) -> None:
        """Reference blocks that `match` found."""
        for block in blocks:
            if self._references[block] == 0:
                del self._lru[block]
            self._references[block] += 1

    def allocate(self, n: int) -> list[int]:
        """`n` blocks with one reference each, evicting cached ones when needed; the caller checked `available`."""
        return [self._take() for _ in range(n)]

    def release(self, table: Sequence[int]) -> None:
        """Drop one reference of every block of a table, children first."""
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._digests[block] is None:
                    self._blank.append(block)
                else:
                    self._lru[block] = None

    def publish(self, block: int, parent: int, digest: bytes, hashes: tuple[int, ...]) -> bool:
        """Make a written block reusable; `parent` is the block before it in its table, 0 for the first.

        Returns False when the block must stay private: its parent is private, or another request uses the canonical
        block of the same prefix. An unused canonical block is replaced, so that `block`'s children can be published.
        """
        if parent != NULL_BLOCK and self._digests[parent] is None:
            return False
        other = self._canonical.get(digest)
        if other == block:
            return True
        if other is None:
            self._announcer.stored(hashes)
        elif self._references[other]:
            return False
        else:
            self._places.evicted(digest)
            del self._lru[other]
            self._forget(other)
            self._blank.append(other)
        self._canonical[digest] = block  # a replaced digest keeps its place in the order
        self._digests[block] = digest
        self._hashes[block] = hashes
        self._places.published(BlockName(digest, self._digests[parent] or b"", hashes))
        return True

    def hashes(self) -> list[int]:
        """Wire hashes of all canonical blocks, parents before children."""
        return list(dict.fromkeys(value for block in self._canonical.values() for value in self._hashes[block]))

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the books agree with the block tables of all requests."""
        held = Counter(block for table in tables for block in table)
        assert NULL_BLOCK not in held
        assert all(self._references[block] == held[block] for block in range(self.total + 1)), "refcounts != tables"
        assert len(self._blank) + len(self._lru) + len(held) == self.total, "free + cached + used != total"
        assert len(set(self._blank)) == len(self._blank)
        assert not set(self._blank) & set(self._lru)
        assert not any(self._references[block] for block in (*self._blank, *self._lru))
        assert all(self._digests[block] is None for block in self._blank)
        canonical = {digest: block for block, digest in enumerate(self._digests) if digest is not None}
        assert canonical == self._canonical

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block = next(iter(self._lru))
            del self._lru[block]
            digest = self._digests[block]
            assert digest is not None
            del self._canonical[digest]
            self._announcer.removed(self._hashes[block])
            self._places.evicted(digest)
            self._forget(block)
        self._references[block] = 1
        return block

    def _forget(self, block: int) -> None:
        self._digests[block] = None
        self._hashes[block] = ()
