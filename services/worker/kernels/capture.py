"""Captures which kernels a step calls, and calls them again without Python in between.

A step of a small model is hundreds of kernels of microseconds each: to call one from Python takes as long. This
is to a CPU what CUDA graphs are to a GPU. A step is computed as usual while it is captured; its kernels, and the
collectives between them, are called with the same arguments ever after, so whatever changes from step to step must lie
where it lay, and must not be an argument itself.
"""

from __future__ import annotations

import bisect
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from services.worker.kernels.bfloat16 import REPLAYED, Bfloat16Kernels, Call, Collectives
from services.worker.kernels.library import FUNCTIONS
from services.worker.kernels.signatures import REDUCE, most_arguments

_WORDS = 1 + most_arguments(FUNCTIONS)  # of a call in replay.c: which kernel, and its arguments
_ALIGNMENT = 64
_ALLOCATIONS = {torch.empty, torch.Tensor.new_empty}
_VIEWS = {torch.Tensor.view, torch.Tensor.chunk, torch.Tensor.__getitem__}
_QUESTIONS = {
    *(torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__),
    *(torch.Tensor.is_contiguous, torch.Tensor.size),
}

Reduce = Callable[[torch.Tensor], torch.Tensor]


class Sizes(NamedTuple):
    """How large a step is."""

    rows: int
    sequences: int

    def on_line(self, one: Sizes, other: Sizes) -> bool:
        """Whether these sizes lie on the line through two others: what two steps show of a third one at least."""
        rows, sequences = other.rows - one.rows, other.sequences - one.sequences
        return (self.rows - one.rows) * sequences == (self.sequences - one.sequences) * rows

    def tell_apart(self, other: Sizes) -> bool:
        """Whether what grows from one to the other shows by how much whether it grows with rows or with sequences."""
        differ = self.rows != other.rows and self.sequences != other.sequences
        return differ and self.rows * other.sequences != self.sequences * other.rows


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor [rows, ...] lies in `room`, which is the arena or was there before the step."""

    room: torch.Tensor  # [n_bytes] uint8
    offset: int  # in bytes
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self, rows: int) -> torch.Tensor:
        """The tensor, with another number of rows."""
        shape = (rows, *self.shape[1:])
        n_bytes = math.prod(shape) * self.dtype.itemsize
        return self.room[self.offset : self.offset + n_bytes].view(self.dtype).view(shape)


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """What a step of that size called, with its own tensors in `arena`."""

    sizes: Sizes
    calls: torch.Tensor  # [n, _WORDS] int64, as in replay.c
    counts: torch.Tensor  # [n, _WORDS] bool: which of the words are numbers, not addresses
    result: Place
    arena: torch.Tensor

    def program(self, kernels: Bfloat16Kernels) -> Program:
        """What runs the step again."""
        return Program(kernels, self.calls, self.arena, self.result.tensor(self.sizes.rows))


@dataclass(frozen=True, slots=True)
class Growth:
    """What two graphs show of steps of other sizes: which numbers grow with the rows, and which with the sequences.

    Every other word is the same in both.
    """

    one: CapturedGraph
    other: Sizes
    grown: tuple[torch.Tensor, torch.Tensor]  # by rows, by sequences: int64 indices into the flat calls

    @classmethod
    def between(cls, one: CapturedGraph, other: CapturedGraph) -> Growth | None:
        """None unless every argument is the same in both, or a multiple of the rows, or of the sequences."""
        if one.calls.shape != other.calls.shape:
            return None
        known, grown = one.calls == other.calls, []
        for mine, others in zip(one.sizes, other.sizes, strict=True):
            grows = ~known & one.counts & (one.calls * others == other.calls * mine)
            grown.append(grows.view(-1).nonzero().view(-1))
            known |= grows
        return cls(one, other.sizes, (grown[0], grown[1])) if known.all() else None

    def of_sizes(self, sizes: Sizes) -> CapturedGraph | None:
        """The graph of a step that was not captured; None if the two are too much alike to show it."""
        mine = self.one.sizes
        if not (mine.tell_apart(self.other) or sizes.on_line(mine, self.other)):
            return None
        calls = self.one.calls.clone()
        words = calls.view(-1)
        for indices, size, wanted in zip(self.grown, mine, sizes, strict=True):
            counts = words[indices] * wanted
            if (counts % size).any():
                return None
            words[indices] = counts // size
        return replace(self.one, sizes=sizes, calls=calls)


@dataclass(frozen=True, slots=True)
class Program:
    """A captured step, ready to run. What it returns lasts until another one of the same arena is run."""

    kernels: Bfloat16Kernels
    calls: torch.Tensor  # [n, _WORDS]
    arena: torch.Tensor
    result: torch.Tensor

    def run(self, reduce: Reduce, group: Collectives | None) -> torch.Tensor:
        """Compute the step and return its result; `reduce` sums over the ranks in place what `group` does not."""
        at, n = 0, len(self.calls)
        while (at := self.kernels.replay(self.calls, at, group)) < n:
            reduce(self._summand(at))
            at += 1
        return self.result

    def _summand(self, at: int) -> torch.Tensor:
        address, count = self.calls[at, 1:3].tolist()
        offset = address - self.arena.data_ptr()
        return self.arena[offset : offset + count * torch.bfloat16.itemsize].view(torch.bfloat16)


class GraphCapture(TorchFunctionMode):
    """Active in a `with` block: notes every kernel called, every tensor made and every collective.

    `foreign` names what torch itself computed meanwhile: a step with any of that cannot be replayed.
    """

    def __init__(self, kernels: Bfloat16Kernels, reduce: Reduce) -> None:
        super().__init__()
        self.foreign: set[str] = set()
        self._kernels, self._inner_reduce = kernels, reduce
        self._calls: list[Call] = []
        self._made: list[torch.Tensor] = []  # kept, lest two of them get the same address

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and note what it was."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._made.append(result)
        elif not (func in _QUESTIONS or func.__name__ == "__get__" or _is_view(func, args, result)):
            self.foreign.add(func.__name__)
        return result

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place, and note that; returns `x`."""
        self._calls.append((REDUCE, (x.data_ptr(), x.numel())))
        before = set(self.foreign)
        self._inner_reduce(x)
        self.foreign = before  # what a collective computes is its own affair
        return x

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Compute a step in here."""
        with self._kernels.noted_in(self._calls), self:
            yield

    def graph(self, sizes: Sizes, most_rows: int, result: torch.Tensor, arena: torch.Tensor) -> CapturedGraph:
        """Return what was noted: a step of that size, which left its result in `result`.

        `arena` serves other graphs, too; it is replaced where it is too small for `most_rows` rows.
        """
        memory = Memory(self._made, Fraction(most_rows, sizes.rows))
        for index, (name, arguments) in enumerate(self._calls):
            for kind, argument in zip(REPLAYED[name], arguments, strict=True):
                if kind == "pointer" and argument is not None:
                    memory.use(argument, index)
        size = memory.place()
        if size > len(arena):
            arena = torch.empty(size, dtype=torch.uint8)
        base = arena.data_ptr()
        return CapturedGraph(
            sizes,
            calls=_table([_words(call, memory, base) for call in self._calls], torch.int64),
            counts=_table([_counts(name) for name, _ in self._calls], torch.bool),
            result=memory.place_of(result, arena),
            arena=arena,
        )


def _table(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> torch.Tensor:
    """[n, _WORDS], also of no rows at all: there may be no layer but the last."""
    return torch.tensor(rows, dtype=dtype).view(-1, _WORDS)


def _words(call: Call, memory: Memory, base: int) -> list[int]:
    """A call as replay.c reads it, with the arena at the address `base`."""
    name, arguments = call
    words = [list(REPLAYED).index(name)]
    for kind, argument in zip(REPLAYED[name], arguments, strict=True):
        if kind == "float":
            words.append(struct.unpack("<q", struct.pack("<f4x", argument))[0])
        elif kind == "pointer":
            words.append(memory.moved(argument or 0, base))
        else:
            words.append(int(argument))
    return [*words, *[0] * (_WORDS - len(words))]


def _counts(name: str) -> list[bool]:
    """Which words of a call are whole numbers."""
    known = [False, *(kind in ("long", "int") for kind in REPLAYED[name])]
    return [*known, *[False] * (_WORDS - len(known))]


@dataclass(slots=True)
class _Allocation:
    tensor: torch.Tensor
    room: int  # bytes
    first: int  # of the calls that name it
    last: int
    offset: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.room


def _is_view(func: Any, args: Any, result: Any) -> bool:
    """Whether nothing was computed: an index may be a slice or a list of rows to be copied."""
    if func is not torch.Tensor.__getitem__:
        return func in _VIEWS
    return bool(result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr())


class Memory:
    """Where the tensors of a step lie, and where they are to lie in an arena, which has room for those of one time."""

    def __init__(self, made: Sequence[torch.Tensor], growth: Fraction = Fraction(1)) -> None:
        """`growth`: how many times as large they may become."""
        self._made, self._growth = {tensor.data_ptr(): tensor for tensor in made}, growth
        self._starts = sorted(self._made)
        self._used: dict[int, _Allocation] = {}  # by address, in the order of their first use

    def use(self, address: int, index: int) -> None:
        """Call `index` names an address; addresses of tensors that were there before the step stay what they are."""
        start = self._start_of(address)
        if start is not None:
            tensor = self._made[start]
            room = math.ceil(tensor.nbytes * self._growth / _ALIGNMENT) * _ALIGNMENT
            self._used.setdefault(start, _Allocation(tensor, room, index, index)).last = index

    def place(self) -> int:
        """Give each tensor a place that it shares with none that lives at the same time; returns the bytes needed."""
        placed: list[_Allocation] = []
        for allocation in self._used.values():
            for other in sorted((a for a in placed if a.last >= allocation.first), key=lambda a: a.offset):
                if allocation.end <= other.offset:
                    break
                allocation.offset = max(allocation.offset, other.end)
            placed.append(allocation)
        return max((allocation.end for allocation in placed), default=0)

    def place_of(self, tensor: torch.Tensor, arena: torch.Tensor) -> Place:
        """Where a tensor is: in the arena if it was made during the step, else where it was."""
        start = self._start_of(tensor.data_ptr())
        if start is not None:
            return Place(arena, self._used[start].offset, tensor.shape, tensor.dtype)
        room = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        return Place(room, int(tensor.storage_offset()) * tensor.itemsize, tensor.shape, tensor.dtype)

    def moved(self, address: int, base: int) -> int:
        """The same place in the arena at `base`; addresses of other tensors stay what they are."""
        start = self._start_of(address)
        return address if start is None else base + self._used[start].offset + address - start

    def _start_of(self, address: int) -> int | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self._made[self._starts[place]].nbytes:
            return None
        return self._starts[place]
