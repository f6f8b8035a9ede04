"""Captures which kernels a step calls, and calls them again without Python in between.

A step of a small model is hundreds of kernels of microseconds each: to call one from Python takes as long. This
is to a CPU what CUDA graphs are to a GPU. A step is computed as usual while it is captured; its kernels, and the
collectives between them, are called with the same arguments ever after, but for the counts of rows and sequences, which
`source/kernels.h` declares. So one captured step is every step, and whatever else changes must lie where it lay.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from services.worker.kernels.bfloat16 import REPLAYED, Bfloat16Kernels, Call, Collectives, Sizes
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


class NotReplayableError(Exception):
    """A step does what no replay could do again at other sizes."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """What steps of all sizes call, with their own tensors in `arena`."""

    kernels: Bfloat16Kernels
    calls: torch.Tensor  # [n, _WORDS] int64, as in replay.c
    arena: torch.Tensor
    result: torch.Tensor  # [most rows, ...]

    def replay(self, sizes: Sizes, reduce: Reduce, group: Collectives | None) -> torch.Tensor:
        """Compute a step; what is returned lasts until the next one.

        `reduce` sums over the ranks in place what `group` does not.
        """
        at, n = 0, len(self.calls)
        while (at := self.kernels.replay(self.calls, at, sizes, group)) < n:
            reduce(self._summand(at, sizes.row_count))
            at += 1
        return self.result[: sizes.row_count]

    def _summand(self, at: int, rows: int) -> torch.Tensor:
        _, address, _, width = self.calls[at, : 1 + len(REPLAYED[REDUCE])].tolist()
        offset = address - self.arena.data_ptr()
        return self.arena[offset : offset + rows * width * torch.bfloat16.itemsize].view(torch.bfloat16)


class GraphCapture(TorchFunctionMode):
    """Notes every kernel that a step calls, every tensor it makes and every collective."""

    def __init__(self, kernels: Bfloat16Kernels, reduce: Reduce, sizes: Sizes) -> None:
        """`sizes`: of the step that is captured."""
        super().__init__()
        self._kernels, self._inner_reduce, self._sizes = kernels, reduce, sizes
        self._foreign: set[str] = set()  # what torch itself computed
        self._calls: list[Call] = []
        self._made: list[torch.Tensor] = []  # kept, lest two of them get the same address

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and note what it was."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._made.append(result)
        elif not (func in _QUESTIONS or func.__name__ == "__get__" or _is_view(func, args, result)):
            self._foreign.add(func.__name__)
        return result

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` [rows, width] over the ranks in place, and note that; returns `x`."""
        self._calls.append((REDUCE, (x.data_ptr(), *x.shape)))
        before = set(self._foreign)
        self._inner_reduce(x)
        self._foreign = before  # what a collective computes is its own affair
        return x

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Compute the step in here."""
        with self._kernels.noted_in(self._calls), self:
            yield

    def graph(self, most_rows: int, result: torch.Tensor) -> CapturedGraph:
        """Return what was noted, for steps of up to `most_rows` rows; the one captured left its result in `result`.

        Raises NotReplayableError for what torch computed, and for what is not as large as the step's rows or sequences.
        """
        if self._foreign:
            raise NotReplayableError(f"they need {', '.join(sorted(self._foreign))}")
        memory = Memory(self._made, self._sizes.row_count, most_rows)
        for index, call in enumerate(self._calls):
            self._use(memory, call, index)
        arena = torch.empty(memory.place(), dtype=torch.uint8)
        words = [_words(call, memory, arena.data_ptr()) for call in self._calls]
        calls = torch.tensor(words, dtype=torch.int64).view(-1, _WORDS)  # none at all of no layer but the last
        return CapturedGraph(self._kernels, calls, arena, memory.in_arena(result, arena))

    def _use(self, memory: Memory, call: Call, index: int) -> None:
        name, arguments = call
        steps = self._sizes._asdict()
        for kind, argument in zip(REPLAYED[name], arguments, strict=True):
            if kind == "pointer" and argument is not None:
                memory.use(argument, index)
            elif steps.get(kind, argument) != argument:
                raise NotReplayableError(
                    f"they call {name} with a {kind} of {argument}, which is {steps[kind]} in the step"
                )


def _words(call: Call, memory: Memory, base: int) -> list[int]:
    """A call as replay.c reads it, with the arena at the address `base`; counts, which it does not read, are 0."""
    name, arguments = call
    words = [list(REPLAYED).index(name)]
    for kind, argument in zip(REPLAYED[name], arguments, strict=True):
        if kind == "float":
            words.append(struct.unpack("<q", struct.pack("<f4x", argument))[0])
        elif kind == "pointer":
            words.append(memory.moved(argument or 0, base))
        else:
            words.append(0 if kind in Sizes._fields else int(argument))
    return [*words, *[0] * (_WORDS - len(words))]


@dataclass(slots=True)
class _Allocation:
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

    def __init__(self, made: Sequence[torch.Tensor], rows: int, most_rows: int) -> None:
        """The tensors made are [rows, ...], and are to have room for `most_rows`."""
        self._made = {tensor.data_ptr(): tensor for tensor in made}
        self._starts = sorted(self._made)
        self._rows, self._most_rows = rows, most_rows
        self._used: dict[int, _Allocation] = {}  # by address, in the order of their first use

    def use(self, address: int, index: int) -> None:
        """Call `index` names an address; addresses of tensors that were there before the step stay what they are.

        Raises NotReplayableError for a tensor that is no such rows, or an address that is in none but the first.
        """
        start = self._start_of(address)
        if start is None:
            return
        tensor = self._made[start]
        if tensor.shape[0] != self._rows:
            raise NotReplayableError(f"they make a tensor {list(tensor.shape)} where the step has {self._rows} rows")
        row = tensor.nbytes // self._rows
        if address - start >= row:
            raise NotReplayableError(
                f"they use a tensor {list(tensor.shape)} from its row {(address - start) // row} on"
            )
        room = -(-row * self._most_rows // _ALIGNMENT) * _ALIGNMENT
        self._used.setdefault(start, _Allocation(room, index, index)).last = index

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

    def in_arena(self, tensor: torch.Tensor, arena: torch.Tensor) -> torch.Tensor:
        """The same tensor of the most rows: in the arena if it was made during the step, else where it was."""
        shape, strides = (self._most_rows, *tensor.shape[1:]), tensor.stride()
        if self._start_of(tensor.data_ptr()) is None:
            return tensor.as_strided(shape, strides)
        offset = self.moved(tensor.data_ptr(), 0)
        return arena.view(tensor.dtype).as_strided(shape, strides, offset // tensor.itemsize)

    def moved(self, address: int, base: int) -> int:
        """The same place in the arena at `base`; addresses of other tensors stay what they are."""
        start = self._start_of(address)
        return address if start is None else base + self._used[start].offset + address - start

    def _start_of(self, address: int) -> int | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self._made[self._starts[place]].nbytes:
            return None
        return self._starts[place]
