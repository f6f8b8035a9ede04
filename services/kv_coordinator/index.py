"""An exact index of which worker holds which prefix block in which place, small enough for a large fleet.

Workers evict leaves first, so that each place of a worker always holds a chain from its beginning. Therefore a mapping
from block hash to a bitmask of places, with a binary search over the chain, gives every place's exact depth.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2

# The top bits of the hash select one of 8,192 dicts. A single dict of 100 million entries would block for seconds when
# it grows; one of 12,000 entries blocks for a millisecond or two, and is swept without a pause. Also, the other bits
# of the hash need an int of 32 bytes instead of 48.
SHARD_BITS = 13
_SHIFT = 64 - SHARD_BITS
_KEY = (1 << _SHIFT) - 1


@dataclass(slots=True)
class Slot:
    """The bit of a worker's place in the masks. After a reset the place gets another slot, and the old one is swept."""

    number: int
    worker_id: str
    incarnation: str
    place: int = worker_pb2.KV_PLACE_DEVICE
    blocks: int = 0


class BlockIndex:
    """The index, for use by one thread. No operation takes longer than a few milliseconds, regardless of its size."""

    def __init__(self) -> None:
        self._shards: list[dict[int, int]] = [{} for _ in range(1 << SHARD_BITS)]
        self._bits: list[int] = []  # 1 << number; all entries with only this holder share the int
        self.slots: list[Slot | None] = []  # by number
        self.version = time.time_ns()  # version of `slots`, which each new slot and each process changes
        self._free: list[int] = []
        self._live = 0  # mask of slots whose entries count
        self._dead = 0  # mask of slots to be swept
        self.entries = 0  # (block, worker) pairs of live slots

    def open_slot(self, worker_id: str, incarnation: str, place: int = worker_pb2.KV_PLACE_DEVICE) -> Slot:
        """A new slot for a place of a worker, without blocks."""
        if self._free:
            number = self._free.pop()
        else:
            number = len(self.slots)
            self.slots.append(None)
            self._bits.append(1 << number)
        slot = self.slots[number] = Slot(number, worker_id, incarnation, place)
        self.version += 1
        self._live |= self._bits[number]
        return slot

    def close_slot(self, slot: Slot) -> None:
        """Close a slot: look-ups ignore it at once, and :meth:`sweep` frees its memory."""
        bit = self._bits[slot.number]
        self._live &= ~bit
        self._dead |= bit
        self.entries -= slot.blocks
        slot.blocks = 0

    def store(self, slot: Slot, hashes: Iterable[int]) -> None:
        """Add blocks that the worker now holds."""
        shards, bit, added = self._shards, self._bits[slot.number], 0
        for block in hashes:
            shard = shards[block >> _SHIFT]
            key = block & _KEY
            holders = shard.get(key)
            if holders is None:
                shard[key] = bit
            elif holders & bit:
                continue
            else:
                shard[key] = holders | bit
            added += 1
        slot.blocks += added
        self.entries += added

    def remove(self, slot: Slot, hashes: Iterable[int]) -> None:
        """Remove blocks that the worker no longer holds."""
        shards, bit, removed = self._shards, self._bits[slot.number], 0
        for block in hashes:
            shard = shards[block >> _SHIFT]
            key = block & _KEY
            holders = shard.get(key, 0)
            if not holders & bit:
                continue
            removed += 1
            if holders == bit:
                del shard[key]
            else:
                shard[key] = holders ^ bit
        slot.blocks -= removed
        self.entries -= removed

    def holders(self, block: int) -> int:
        """Bitmask of the live slots that hold a block."""
        return self._shards[block >> _SHIFT].get(block & _KEY, 0) & self._live

    def depths(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Pairs of depth (> 0) and bitmask of the slots that hold exactly that many leading blocks."""
        if not chain:
            return []
        last = len(chain) - 1
        first_holders, last_holders = self.holders(chain[0]), self.holders(chain[last])
        groups = [(last + 1, last_holders)] if last_holders else []
        spans = [(0, first_holders, last, last_holders)]
        while spans:
            low, low_holders, high, high_holders = spans.pop()
            # Slots that hold block `low` but not block `high`: their depth is in (low, high].
            ending = low_holders & ~high_holders
            if not ending:
                continue
            if high - low == 1:
                groups.append((high, ending))
                continue
            middle = (low + high) // 2
            middle_holders = self.holders(chain[middle])
            spans.append((low, low_holders, middle, middle_holders))
            spans.append((middle, middle_holders, high, high_holders))
        return groups

    def members(self, mask: int) -> Iterator[Slot]:
        """The slots of a bitmask."""
        while mask:
            number = mask.bit_length() - 1
            mask ^= self._bits[number]
            slot = self.slots[number]
            assert slot is not None
            yield slot

    def blocks(self) -> int:
        """Number of distinct blocks, including unswept ones."""
        return sum(map(len, self._shards))

    def needs_sweep(self) -> bool:
        """Whether closed slots hold memory."""
        return self._dead != 0

    def sweep(self, slice_s: float) -> Iterator[None]:
        """Remove the entries of closed slots, yielding after every `slice_s`; then free the slots' numbers.

        Slots that are closed during a sweep are left to the next one.
        """
        dead = self._dead
        pause_at = time.perf_counter() + slice_s
        for shard in self._shards:
            for key, holders in [item for item in shard.items() if item[1] & dead]:
                if left := holders & ~dead:
                    shard[key] = left
                else:
                    del shard[key]
            if time.perf_counter() >= pause_at:
                yield
                pause_at = time.perf_counter() + slice_s
        self._dead &= ~dead
        for number in [slot.number for slot in self.members(dead)]:
            self.slots[number] = None
            self._free.append(number)
