"""Places of rows in images: their time, line and column, by which ropes turn (M-RoPE, arXiv:2409.12191).

A text's row has its position as all three. An image takes as many positions as its longer side has rows: so those after
it are lower than in the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.compute.backends.batch import StepNumbers
from services.worker.rank.batching import BatchLayout

Ints = NDArray[np.int64]
Span = tuple[int, int, int]  # position of an image's first row, lines, columns


class _Placed(NamedTuple):
    places: Ints  # [3, n], up to the end of the last image
    shift: int  # added to the positions after that


def places_of(spans: Sequence[Span]) -> tuple[Ints, int]:
    """Return the places [3, n] up to the end of the last image, and what to add to later positions."""
    parts: list[Ints] = []
    done = at = 0
    for first, lines, columns in spans:
        text = np.arange(at, at + first - done)
        at += len(text)
        grid = np.indices((1, lines, columns)).reshape(3, -1) + at
        parts += [np.broadcast_to(text, (3, len(text))), grid]
        at, done = at + max(lines, columns), first + lines * columns
    return np.concatenate(parts, axis=1), at - done


class SlotPlaces:
    """The places of sequences with images, by slot."""

    def __init__(self) -> None:
        self._slots: dict[int, _Placed] = {}

    def release(self, slot: int) -> None:
        """Forget a slot's images."""
        self._slots.pop(slot, None)

    def admit(self, slot: int, spans: Sequence[Span]) -> None:
        """Give a released slot to a sequence with these images, which may be none."""
        if spans:
            self._slots[slot] = _Placed(*places_of(spans))

    def placed(self, numbers: StepNumbers, layout: BatchLayout) -> StepNumbers:
        """Return the step with the rows' places; rows of texts alone keep one position each."""
        if not self._slots:
            return numbers
        positions, parts = numbers.positions.copy(), list[tuple[slice, Ints]]()
        for index, slot in enumerate(layout.slots.tolist()):
            if (known := self._slots.get(slot)) is None:
                continue
            start, end, row_end = (int(of[index]) for of in (layout.starts, layout.ends, layout.row_ends))
            first_row, places = row_end - (end - start), known.places[:, start:end]
            positions[first_row:row_end] += known.shift
            rows = slice(first_row, first_row + places.shape[1])
            positions[rows] = places[0]
            if (places[1:] != places[0]).any():
                parts.append((rows, places))
        if not parts:
            return replace(numbers, positions=positions)
        of_rows = np.tile(positions, (3, 1))
        for rows, places in parts:
            of_rows[:, rows] = places
        return replace(numbers, positions=positions, places=of_rows)
