"""States of a rank's recurrent layers: one row for each slot of a running request, then rows of snapshots."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.compute.backends.shapes import StateFormat
from services.compute.backends.zeros import zeros

Ints = NDArray[np.int64]


class StateStore:
    """The states of all layers by row. `layers[i]` are the parts of layer i, each [n_rows, ...]."""

    def __init__(self, state: StateFormat, n_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is the dtype of the computation. Rows take no memory of the host until they are written."""
        self.layers = [
            tuple(zeros((n_rows, *part.shape), torch.float32 if part.exact else dtype, device) for part in parts)
            for parts in state.layers
        ]

    def begin(self, segments: Sequence[StateRows]) -> None:
        """Set the rows of sequences that begin in a step to the state before the first token."""
        fresh = [segment.row for segment in segments if segment.fresh]
        for parts in self.layers:
            for part in parts:
                for row in fresh:
                    part[row].zero_()

    def save(self, segments: Sequence[StateRows]) -> None:
        """Copy the states of the sequences that are to be saved after a step."""
        for segment in segments:
            if segment.save >= 0:
                self.copy(segment.row, segment.save)

    def copy(self, source: int, target: int) -> None:
        """Copy a row of all layers."""
        for parts in self.layers:
            for part in parts:
                part[target].copy_(part[source])


@dataclass(frozen=True, slots=True)
class StateRows:
    """Rows [first, end) of a step, which follow each other in one sequence."""

    first: int
    end: int
    row: int  # the store's row with the state before and after these rows
    fresh: bool = False  # the sequence begins here
    save: int = -1  # the store's row that gets a copy of the state after these rows; -1: none


@dataclass(frozen=True, slots=True)
class ScanTokens:
    """The steps of tokens on the states [.., n_heads, height, width] of heads, in order; all float32.

    A state becomes decay * state + inputs (outer) b, and its product with c is the result. With a `rate` the inputs are
    first corrected by the product of the decayed state with b, and multiplied by the rate (the delta rule).
    With `rates` each number of the state has its decay: exp(decay * rates), a decay for each row of the state.
    """

    inputs: Tensor  # [n, n_heads, height]
    b: Tensor  # [n, n_heads, width]
    c: Tensor  # [n, n_heads, width]
    # [n, n_heads], or [n, n_heads, width]: each column of the state has its own; with `rates` [n, n_heads, height].
    decay: Tensor
    rate: Tensor | None = None  # [n, n_heads]
    rates: Tensor | None = None  # [n_heads, height, width]

    def contiguous(self) -> ScanTokens:
        """Return the same numbers, without gaps."""
        return self._each(Tensor.contiguous)

    def part(self, first: int, end: int) -> ScanTokens:
        """Return tokens [first, end)."""
        return self._each(lambda numbers: numbers[first:end])

    def _each(self, change: Callable[[Tensor], Tensor]) -> ScanTokens:
        rate = None if self.rate is None else change(self.rate)
        inputs, b, c, decay = map(change, (self.inputs, self.b, self.c, self.decay))
        return ScanTokens(inputs, b, c, decay, rate, self.rates)


@dataclass(frozen=True, slots=True)
class StateTurn:
    """Segments of a step, each of another sequence, that a device computes at once: all have one row, or several."""

    segments: Tensor  # [n, 4] int64: first row, row after the last, row of the state, row that gets a copy (-1: none)
    longest: int  # rows of the longest


@dataclass(frozen=True, slots=True)
class StatePlan:
    """A step's segments as layers compute them: first `n_single` segments of one row each, all at once."""

    n_rows: int  # rows of the step
    n_single: int
    singles: Tensor  # [n_single] int64, their rows of the store
    saves: tuple[tuple[int, int], ...]  # copies from row to row after these
    runs: tuple[StateRows, ...]  # the others, in order
    turns: tuple[StateTurn, ...] = ()  # all of them, for a device that computes many sequences at once

    @classmethod
    def of(cls, segments: Sequence[StateRows], device: torch.device) -> StatePlan:
        """Lay out the segments of a step: those of one row that lead it are computed together.

        Several segments of a sequence are computed in turn, in the given order. Devices that compute one sequence after
        another compute those that follow each other in the step as one.
        """
        counts = Counter(one.row for one in segments)
        leads = ((one.first, one.end) == (i, i + 1) and counts[one.row] == 1 for i, one in enumerate(segments))
        n = next((i for i, alone in enumerate(leads) if not alone), len(segments))
        saves = tuple((one.row, one.save) for one in segments[:n] if one.save >= 0)
        turns = _turns(segments, device)
        singles = turns[0].segments[:n, 2].contiguous()  # those that lead are the first of their turn
        return cls(max(one.end for one in segments), n, singles, saves, _joined(segments[n:]), turns)

    @classmethod
    def of_singles(cls, segments: Tensor) -> StatePlan:
        """Return the plan of a step of one row a sequence that only the device knows; `segments` as in `StateTurn`.

        Segments whose state has a negative row are padding.
        """
        n = len(segments)
        return cls(n, n, segments[:, 2], (), (), (StateTurn(segments, 1),))


def _joined(segments: Sequence[StateRows]) -> tuple[StateRows, ...]:
    """Return the segments with those of one sequence joined whose rows follow each other without a copy between."""
    joined: list[StateRows] = []
    for one in segments:
        last = joined[-1] if joined else None
        if last is not None and (last.row, last.end, last.save) == (one.row, one.first, -1):
            joined[-1] = replace(last, end=one.end, save=one.save)
        else:
            joined.append(one)
    return tuple(joined)


def segment_table(segments: Sequence[StateRows]) -> Ints:
    """Return segments as a device reads them, [n, 4] int64."""
    return np.array([(one.first, one.end, one.row, one.save) for one in segments], np.int64)


def _turns(segments: Sequence[StateRows], device: torch.device) -> tuple[StateTurn, ...]:
    """Return the segments by their number in their sequence; those of one row come before those of several."""
    passed = Counter[int]()
    groups = defaultdict[tuple[int, bool], list[StateRows]](list)
    for one in segments:
        groups[passed[one.row], one.end - one.first > 1].append(one)
        passed[one.row] += 1
    ordered = [groups[key] for key in sorted(groups)]
    table = torch.from_numpy(segment_table([one for group in ordered for one in group]))
    parts = torch.split(table.to(device, non_blocking=True), [len(group) for group in ordered])
    longest = [max(one.end - one.first for one in group) for group in ordered]
    return tuple(StateTurn(part, most) for part, most in zip(parts, longest, strict=True))


def copy_rows(state: Tensor, pairs: tuple[tuple[int, int], ...]) -> None:
    """Copy rows of a part of a state, from the first to the second of each pair."""
    for source, target in pairs:
        state[target] = state[source]


def in_turn(advance: Callable[[Tensor, int, int], None], state: Tensor, plan: StatePlan) -> None:
    """Compute a step's sequences, one call of `advance(rows, first, end)` after another.

    A call changes the states in `rows` [sequences] int64 by the step's rows [first, end), as many of each sequence.
    """
    if plan.n_single:
        advance(plan.singles, 0, plan.n_single)
        copy_rows(state, plan.saves)
    for run in plan.runs:
        advance(torch.tensor([run.row], device=state.device), run.first, run.end)
        if run.save >= 0:
            state[run.save] = state[run.row]
