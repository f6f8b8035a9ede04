"""Keeps what lives as long as the process out of the garbage collector's sight.

A full collection walks every container there is: 0.14 ms for each worker that is followed, 40 ms for a gateway that has
only just started, all of it a pause in the middle of whatever the event loop is doing. What is frozen is not walked; it
is still freed as soon as nothing refers to it, unless it is part of a cycle.
"""

from __future__ import annotations

import gc

# Allocations that are not freed again before the youngest generation is walked. Python's 700 is a few requests' worth,
# most of which are still running: they are walked again and again and found alive.
YOUNG_ALLOCATIONS = 10_000
# Frozen members that have left keep their cycles; past this share of the others everything is looked through once.
LEFT_SHARE = 0.1


def freeze_started() -> None:
    """To be called once, when a process has imported and built what it serves with."""
    gc.set_threshold(YOUNG_ALLOCATIONS, *gc.get_threshold()[1:])
    gc.collect()
    gc.freeze()


class FleetHeap:
    """Freezes what belongs to the members of a fleet when no more of them come or go."""

    def __init__(self) -> None:
        self._seen = self._frozen = (0, 0)
        self._left_frozen = 0

    def freeze_if_still(self, joined: int, left: int) -> bool:
        """To be called now and then with how many have ever joined and left; whether it froze anything."""
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
