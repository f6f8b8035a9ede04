"""Records which kernels a step calls, and calls them again without Python in between.

A decode step of a small model is hundreds of kernels of microseconds each: to call one from Python takes as long. This
is to a CPU what CUDA graphs are to a GPU. A step is computed as usual while it is recorded; its pieces between
collectives are replayed with the same arguments ever after, so whatever changes from step to step must lie where it
lay, and must not be an argument itself.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from services.worker.kernels.bfloat16 import REPLAYED, SIGNATURES, Bfloat16Kernels, Call
from services.worker.kernels.library import float_, pointer

_WORDS = 18  # of a call in replay.c: which kernel, and the most arguments that one has
_ALIGNMENT = 64
_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty.memory_format, _aten.new_empty.default}
_VIEWS = {
    *(_aten.view.default, _aten.slice.Tensor, _aten.select.int, _aten.as_strided.default, _aten.alias.default),
    *(_aten.split.Tensor, _aten.unsqueeze.default, _aten.detach.default, _aten._unsafe_view.default),
}

Reduce = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Piece:
    """Calls without a collective between them, and the summand that the collective behind them adds up."""

    calls: torch.Tensor  # [n, _WORDS] int64
    summand: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Program:
    """A recorded step. Its tensors lie in an arena: they last until the next program that shares it is run."""

    kernels: Bfloat16Kernels
    pieces: tuple[Piece, ...]
    result: torch.Tensor

    def run(self, reduce: Reduce) -> torch.Tensor:
        """Compute the step again and return its result; `reduce` sums a tensor over the ranks in place."""
        for piece in self.pieces:
            self.kernels.replay(piece.calls)
            if piece.summand is not None:
                reduce(piece.summand)
        return self.result


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Active in a `with` block: notes every kernel called, every tensor made and every collective.

    `foreign` names what torch itself computed meanwhile: a step with any of that cannot be replayed.
    """

    def __init__(self, kernels: Bfloat16Kernels, reduce: Reduce) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.foreign: set[str] = set()
        self._kernels, self._inner_reduce = kernels, reduce
        self._calls: list[Call] = []
        self._made: list[torch.Tensor] = []  # kept, lest two of them get the same address
        self._pauses: list[tuple[int, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, and note what it was."""
        result = func(*args, **(kwargs or {}))
        if func in _ALLOCATIONS:
            self._made.append(result)
        elif func not in _VIEWS:
            self.foreign.add(str(func))
        return result

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks in place, and note when; returns `x`."""
        self._pauses.append((len(self._calls), x))
        before = set(self.foreign)
        self._inner_reduce(x)
        self.foreign = before  # what a collective computes is no part of a piece
        return x

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Compute a step in here."""
        with self._kernels.noted_in(self._calls), self:
            yield

    def program(self, result: torch.Tensor, arena: torch.Tensor) -> tuple[Program, torch.Tensor]:
        """Return the program of what was recorded, whose last call made `result`, and the arena that it needs.

        `arena`: bytes that other programs use, too; replaced by a larger one where it is too small.
        """
        memory = Memory(self._made)
        for index, (name, arguments) in enumerate(self._calls):
            for kind, argument in zip(SIGNATURES[name], arguments, strict=True):
                if kind is pointer and argument is not None:
                    memory.use(argument, index)
        size = memory.place()
        if size > len(arena):
            arena = torch.empty(max(size, 2 * len(arena)), dtype=torch.uint8)
        words = torch.tensor([self._words(call, memory, arena) for call in self._calls])
        cuts = [0, *(n for n, _ in self._pauses), len(self._calls)]
        summands = [*(memory.moved(x, arena) for _, x in self._pauses), None]
        pieces = tuple(
            Piece(words[low:high].clone(), summand)
            for low, high, summand in zip(cuts[:-1], cuts[1:], summands, strict=True)
        )
        return Program(self._kernels, pieces, memory.moved(result, arena)), arena

    def _words(self, call: Call, memory: Memory, arena: torch.Tensor) -> list[int]:
        name, arguments = call
        words = [REPLAYED.index(name)]
        for kind, argument in zip(SIGNATURES[name], arguments, strict=True):
            if kind is float_:
                words.append(struct.unpack("<q", struct.pack("<f4x", argument))[0])
            elif kind is pointer and argument is not None:
                words.append(memory.moved_address(argument, arena))
            else:
                words.append(int(argument or 0))
        return [*words, *[0] * (_WORDS - len(words))]


@dataclass(slots=True)
class _Allocation:
    tensor: torch.Tensor
    first: int  # of the calls that name it
    last: int
    offset: int = 0

    @property
    def end(self) -> int:
        return self.offset + -(-self.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


class Memory:
    """Where the tensors of a step lie, and where they are to lie in an arena, which has room for those of one time."""

    def __init__(self, made: Sequence[torch.Tensor]) -> None:
        self._made = {tensor.data_ptr(): tensor for tensor in made}
        self._starts = sorted(self._made)
        self._used: dict[int, _Allocation] = {}  # by address, in the order of their first use

    def use(self, address: int, index: int) -> None:
        """Call `index` names an address; addresses of tensors that were there before the step stay what they are."""
        start = self._start_of(address)
        if start is not None:
            self._used.setdefault(start, _Allocation(self._made[start], index, index)).last = index

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

    def moved(self, tensor: torch.Tensor, arena: torch.Tensor) -> torch.Tensor:
        """The same tensor in the arena; one that was made during the step, as a whole."""
        offset = self._used[tensor.data_ptr()].offset
        return arena[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def moved_address(self, address: int, arena: torch.Tensor) -> int:
        """The same place in the arena; addresses of other tensors stay what they are."""
        start = self._start_of(address)
        return address if start is None else arena.data_ptr() + self._used[start].offset + address - start

    def _start_of(self, address: int) -> int | None:
        place = bisect.bisect_right(self._starts, address) - 1
        start = self._starts[place] if place >= 0 else 0
        return start if start and address < start + self._made[start].nbytes else None
