"""Captures the kernel calls of a step and replays them without Python, like CUDA graphs on a GPU.

A step of a small model calls hundreds of kernels that take microseconds each, as long as a call from Python. The
captured step is computed as usual. A replay calls its kernels and collectives with the same arguments, except the
counts of rows and sequences, which `source/kernels.h` declares. So a captured step replays at any row count; data that
changes between steps must stay at the same addresses.
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

from services.compute.kernels.bfloat16 import REPLAYED, Bfloat16Kernels, Call, Collectives, StepSizes
from services.compute.kernels.library import FUNCTIONS
from services.compute.kernels.signatures import REDUCE, most_arguments

_WORDS = 1 + most_arguments(FUNCTIONS)  # words of a call in replay.c: the kernel's number and its arguments
_ALIGNMENT = 64
_ALLOCATIONS = {torch.empty, torch.Tensor.new_empty}
_VIEWS = {torch.Tensor.view, torch.Tensor.chunk, torch.Tensor.__getitem__}
_QUESTIONS = {
    *(torch.Tensor.data_ptr, torch.Tensor.stride, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__),
    *(torch.Tensor.is_contiguous, torch.Tensor.size),
}

Reduce = Callable[[torch.Tensor], torch.Tensor]


class NotReplayableError(Exception):
    """A step cannot be replayed at other sizes."""


@dataclass(frozen=True, slots=True)
class CapturedGraph:
    """The calls of a step of any size, with the step's tensors in `arena`."""

    kernels: Bfloat16Kernels
    calls: torch.Tensor  # [n, _WORDS] int64, as in replay.c
    arena: torch.Tensor
    result: torch.Tensor  # [most_rows, ...]

    def replay(self, sizes: StepSizes, reduce: Reduce, group: Collectives | None) -> torch.Tensor:
        """Compute a step; the returned tensor is valid until the next step.

        `reduce` sums over the ranks, in place, the tensors that the kernels cannot sum with `group`.
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
    """Records every kernel call, every collective and every new tensor of a step."""

    def __init__(self, kernels: Bfloat16Kernels, reduce: Reduce, sizes: StepSizes) -> None:
        """`sizes` are those of the captured step."""
        super().__init__()
        self._kernels, self._inner_reduce, self._sizes = kernels, reduce, sizes
        self._foreign: set[str] = set()  # torch functions that computed something
        self._calls: list[Call] = []
        self._made: list[torch.Tensor] = []  # kept alive, so that no two tensors get the same address

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func` and record new tensors and torch's computations."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._made.append(result)
        elif not (func in _QUESTIONS or func.__name__ == "__get__" or _is_view(func, args, result)):
            self._foreign.add(func.__name__)
        return result

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` [rows, width] over the ranks in place and record the collective; returns `x`."""
        self._calls.append((REDUCE, (x.data_ptr(), *x.shape)))
        before = set(self._foreign)
        self._inner_reduce(x)
        self._foreign = before  # a replay calls the collective itself, so torch's computations inside do not matter
        return x

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Record the step that is computed inside this context."""
        with self._kernels.noted_in(self._calls), self:
            yield

    def graph(self, most_rows: int, result: torch.Tensor) -> CapturedGraph:
        """Return the recorded calls for steps of up to `most_rows` rows; `result` is the captured step's result.

        Raises NotReplayableError when torch computed something, or when a count differs from the step's sizes.
        """
        if self._foreign:
            raise NotReplayableError(f"they need {', '.join(sorted(self._foreign))}")
        memory = Arena(self._made, self._sizes.row_count, most_rows)
        for index, call in enumerate(self._calls):
            self._use(memory, call, index)
        arena = torch.empty(memory.place(), dtype=torch.uint8)
        words = [_words(call, memory, arena.data_ptr()) for call in self._calls]
        calls = torch.tensor(words, dtype=torch.int64).view(-1, _WORDS)  # keeps two dimensions without calls
        return CapturedGraph(self._kernels, calls, arena, memory.in_arena(result, arena))

    def _use(self, memory: Arena, call: Call, index: int) -> None:
        name, arguments = call
        steps = self._sizes._asdict()
        for kind, argument in zip(REPLAYED[name], arguments, strict=True):
            if kind == "pointer" and argument is not None:
                memory.use(argument, index)
            elif steps.get(kind, argument) != argument:
                raise NotReplayableError(
                    f"they call {name} with a {kind} of {argument}, which is {steps[kind]} in the step"
                )


def _words(call: Call, memory: Arena, base: int) -> list[int]:
    """A call in the layout of replay.c, with the arena at address `base`; counts, which replay.c ignores, are 0."""
    name, arguments = call
    words = [list(REPLAYED).index(name)]
    for kind, argument in zip(REPLAYED[name], arguments, strict=True):
        if kind == "float":
            words.append(struct.unpack("<q", struct.pack("<f4x", argument))[0])
        elif kind == "pointer":
            words.append(memory.moved(argument or 0, base))
        else:
            words.append(0 if kind in StepSizes._fields else int(argument))
    return [*words, *[0] * (_WORDS - len(words))]


@dataclass(slots=True)
class _Allocation:
    room: int  # bytes
    first: int  # index of the first call that uses the tensor
    last: int  # index of the last call
    offset: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.room


def _is_view(func: Any, args: Any, result: Any) -> bool:
    """Whether `func` returned a view; indexing returns one for a slice and copies for a list of rows."""
    if func is not torch.Tensor.__getitem__:
        return func in _VIEWS
    return bool(result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr())


class Arena:
    """Places a step's tensors in an arena, where tensors with separate lifetimes share memory."""

    def __init__(self, made: Sequence[torch.Tensor], rows: int, most_rows: int) -> None:
        """`made` are the step's tensors [rows, ...]; each gets room for `most_rows` rows."""
        self._made = {tensor.data_ptr(): tensor for tensor in made}
        self._starts = sorted(self._made)
        self._rows, self._most_rows = rows, most_rows
        self._used: dict[int, _Allocation] = {}  # by address, in the order of their first use

    def use(self, address: int, index: int) -> None:
        """Record that call `index` uses `address`; addresses outside the step's tensors are not moved.

        Raises NotReplayableError for a tensor whose first dimension is not the step's rows, or an address beyond its
        first row.
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
        """Give each tensor an offset that overlaps no tensor alive at the same time; returns the arena's bytes."""
        placed: list[_Allocation] = []
        for allocation in self._used.values():
            for other in sorted((a for a in placed if a.last >= allocation.first), key=lambda a: a.offset):
                if allocation.end <= other.offset:
                    break
                allocation.offset = max(allocation.offset, other.end)
            placed.append(allocation)
        return max((allocation.end for allocation in placed), default=0)

    def in_arena(self, tensor: torch.Tensor, arena: torch.Tensor) -> torch.Tensor:
        """`tensor` with `most_rows` rows: in the arena if the step made it, otherwise at its old address."""
        shape, strides = (self._most_rows, *tensor.shape[1:]), tensor.stride()
        if self._start_of(tensor.data_ptr()) is None:
            return tensor.as_strided(shape, strides)
        offset = self.moved(tensor.data_ptr(), 0)
        return arena.view(tensor.dtype).as_strided(shape, strides, offset // tensor.itemsize)

    def moved(self, address: int, base: int) -> int:
        """`address` moved into the arena at `base`; unchanged outside the step's tensors."""
        start = self._start_of(address)
        return address if start is None else base + self._used[start].offset + address - start

    def _start_of(self, address: int) -> int | None:
        place = bisect.bisect_right(self._starts, address) - 1
        if place < 0 or address >= self._starts[place] + self._made[self._starts[place]].nbytes:
            return None
        return self._starts[place]
