"""Freezes long-lived objects, so that the garbage collector skips them.

A full collection walks all containers and stops the event loop meanwhile: 0.14 ms for each followed worker, 40 ms for a
gateway that has just started. Frozen objects are not walked. They are still freed when nothing refers to them, unless
they are part of a cycle.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Net allocations between collections of the youngest generation. Python's default of 700 is reached within a few
# requests: collections would walk the objects of running requests again and again and free none.
YOUNG_ALLOCATIONS = 10_000
# Workers that left stay in memory if they were frozen with cycles. If more than this share of the fleet has left, all
# objects are unfrozen and collected once.
LEFT_SHARE = 0.1
_ARENA_MAX = -8  # M_ARENA_MAX of glibc's malloc.h
_libc = ctypes.CDLL(None)


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in the `with` block.

    For the import of torch: the objects that it makes stay, and hundreds of collections would walk them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def freeze_started() -> None:
    """Freeze all objects. Call it once, after the process has imported and built its parts."""
    gc.set_threshold(YOUNG_ALLOCATIONS, *gc.get_threshold()[1:])
    gc.collect()
    gc.freeze()


def share_heap() -> None:
    """Give all threads one heap, so that `trim` can give back all that is free. Call it before a thread allocates.

    glibc gives each thread a heap of its own, whose free end `trim` leaves: a thread that read the files of a model
    with 152,000 tokens left 25 MiB. Does nothing with another library.
    """
    if mallopt := getattr(_libc, "mallopt", None):
        mallopt(_ARENA_MAX, 1)


def trim() -> None:
    """Give freed memory back to the system, which glibc's allocator keeps otherwise; nothing with another library."""
    if malloc_trim := getattr(_libc, "malloc_trim", None):
        malloc_trim(0)


class FleetHeap:
    """Freezes the objects of a fleet's members once the fleet no longer changes."""

    def __init__(self) -> None:
        self._seen = self._frozen = (0, 0)
        self._left_frozen = 0

    def freeze_if_still(self, joined: int, left: int) -> bool:
        """Freeze if no member has joined or left since the last call; return whether it did.

        Call it at intervals, with the numbers of members that have ever joined and left.
        """
        moved, self._seen = self._seen != (joined, left), (joined, left)
        if moved or self._seen == self._frozen:
            return False
        if left - self._left_frozen > LEFT_SHARE * (joined - left):
            gc.unfreeze()
            self._left_frozen = left
        self._frozen = self._seen
        gc.collect()
        gc.freeze()
        return True
