"""Collectives between CPU ranks on one machine, through shared memory.

One-shot: every rank writes its tensor into its own buffer, publishes a tag, waits for the peers' tags and reads
their buffers. Two alternating buffers per rank (parity) are enough: a rank that writes collective n + 2 has seen the
tag n + 1 of all ranks, and a rank publishes n + 1 only after it has read n.

    tag = (epoch << 24) | index,  epoch = step + 1, 0 while starting; tags only rise
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod

import torch

from services.compute.backends.collectives import GroupSeat
from services.compute.backends.cpu.collectives import ReplayedCollectives
from services.compute.kernels.bfloat16 import Bfloat16Kernels, Collectives
from services.compute.ranks.config import COLLECTIVE_HEADER_BYTES
from services.compute.ranks.futex import Counter
from services.compute.ranks.line import RankState

_SIZES = 64
_INDEX_BITS = 24
_TICK_S = 0.05  # seconds between heartbeats of a waiting rank
_MAX_CACHED_SHAPES = 256
_LOOKS = 500  # checks by the kernel, about 20 us, before Python waits with `Patience`
_HALF = (torch.bfloat16, torch.float16)

Views = tuple[tuple[torch.Tensor, ...], ...]  # [parity][rank], each [numel]


class CollectiveTimeoutError(RuntimeError):
    """Peers did not arrive at a collective; `missing` are their ranks."""

    def __init__(self, message: str, missing: tuple[int, ...]) -> None:
        super().__init__(message)
        self.missing = missing


class CollectiveMismatchError(RuntimeError):
    """A peer called the same collective with a tensor of another size."""


def _describe(tag: int) -> str:
    epoch, index = tag >> _INDEX_BITS, tag & ((1 << _INDEX_BITS) - 1)
    return f"step {epoch - 1}, collective {index}" if epoch else f"start-up, collective {index}"


class SharedMemoryCommunicator(ReplayedCollectives):
    """The collectives of one rank. Sums of every dtype are computed in float32, in rank order, and rounded once.

    A seat's `buffer_bytes` bound the size of one round; larger tensors take several rounds.
    """

    def __init__(self, seat: GroupSeat) -> None:
        self.rank, self.size = seat.rank, seat.size
        self._segment, self._offset, self._buffer_bytes = seat.segment, seat.offset, seat.buffer_bytes
        self._line, self._patience, self._timeout_s = seat.line, seat.patience, seat.timeout_s
        self._stride = COLLECTIVE_HEADER_BYTES + 2 * seat.buffer_bytes
        self._tags = [Counter(seat.segment, seat.offset + r * self._stride) for r in range(seat.size)]
        self._peers = [r for r in range(seat.size) if r != seat.rank]
        self._epoch = 0
        self._views: dict[tuple[int, torch.dtype], Views] = {}
        self.collectives = Collectives(
            area=seat.segment.address + seat.offset,
            stride=self._stride,
            sizes=_SIZES,
            payload=COLLECTIVE_HEADER_BYTES,
            room=seat.buffer_bytes,
            rank=seat.rank,
            ranks=seat.size,
            beats=seat.line.beats_address,
            looks=_LOOKS,
        )

    def begin_step(self, step: int) -> None:
        """Tag the collectives from here on with `step`, which must rise from call to call."""
        if step + 1 <= self._epoch:
            raise ValueError(f"step {step} cannot follow step {self._epoch - 1}")
        self._epoch = step + 1
        self.collectives.tag = self._epoch << _INDEX_BITS

    def take_elapsed_us(self) -> int:
        """Return the microseconds spent in collectives since the last call."""
        elapsed, self.collectives.elapsed_ns = self.collectives.elapsed_ns, 0
        return int(elapsed) // 1000

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; returns `x`."""
        started = time.perf_counter_ns()
        self._reduce(x)
        self.collectives.elapsed_ns += time.perf_counter_ns() - started
        return x

    def _reduce(self, x: torch.Tensor) -> None:
        flat = x.contiguous().view(-1)  # [numel]
        self._in_rounds(flat, lambda views, low, high: self._sum(views, flat[low:high]))
        if flat.data_ptr() != x.data_ptr():
            x.copy_(flat.view(x.shape))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack every rank's `x`: [...] -> [size, ...], the same shape and dtype on every rank."""
        started = time.perf_counter_ns()
        out = torch.empty((self.size, prod(x.shape)), dtype=x.dtype)
        flat = x.contiguous().view(-1)  # [numel]

        def collect(views: tuple[torch.Tensor, ...], low: int, high: int) -> None:
            for row, view in enumerate(views):
                out[row, low:high] = view

        self._in_rounds(flat, collect)
        self.collectives.elapsed_ns += time.perf_counter_ns() - started
        return out.view(self.size, *x.shape)

    def _in_rounds(self, flat: torch.Tensor, consume: Callable[[tuple[torch.Tensor, ...], int, int], None]) -> None:
        per_round = self._buffer_bytes // flat.element_size()
        for low in range(0, flat.numel(), per_round):
            high = min(low + per_round, flat.numel())
            consume(self._exchange(flat[low:high]), low, high)

    def _exchange(self, part: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Publish `part` [n], wait for all ranks, and return views of every rank's part."""
        parity = self.collectives.rounds & 1
        views = self._views_of(part.numel(), part.dtype)[parity]
        views[self.rank].copy_(part)
        tag, n_bytes = self._next_tag(), part.numel() * part.element_size()
        self._segment.words64[self._size_cell(self.rank, parity)] = n_bytes
        self._tags[self.rank].store(tag)
        self._line.beat()
        self._wait_for_peers(tag)
        self._require_sizes(tag, parity, n_bytes)
        return views

    def _next_tag(self) -> int:
        self.collectives.tag += 1
        self.collectives.rounds += 1
        return int(self.collectives.tag)

    def _wait_for_peers(self, tag: int) -> None:
        for peer in self._peers:
            if self._tags[peer].load() < tag:
                self._wait_for(peer, tag)

    def _require_sizes(self, tag: int, parity: int, n_bytes: int) -> None:
        for peer in self._peers:
            theirs = self._segment.words64[self._size_cell(peer, parity)]
            if theirs != n_bytes:
                raise CollectiveMismatchError(
                    f"at {_describe(tag)} rank {peer} brought {theirs} bytes, rank {self.rank} {n_bytes}"
                )

    def _wait_for(self, peer: int, tag: int) -> None:
        deadline = time.monotonic() + self._timeout_s
        self._line.enter(RankState.IN_COLLECTIVE)
        while not self._tags[peer].wait_reach(tag, _TICK_S, self._patience):
            self._line.beat()
            if time.monotonic() > deadline:
                raise self._timeout(tag)
        self._line.enter(RankState.COMPUTING)

    def _timeout(self, tag: int) -> CollectiveTimeoutError:
        missing = tuple(r for r in self._peers if self._tags[r].load() < tag)
        where = "; ".join(f"rank {r} is at {_describe(self._tags[r].load())}" for r in missing)
        return CollectiveTimeoutError(
            f"rank {self.rank} waited {self._timeout_s:g} s at {_describe(tag)}: {where}", missing
        )

    def _sum(self, views: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        if self.size == 2:  # a single addition, which torch computes in float32 and rounds once
            torch.add(views[0], views[1], out=out)
            return
        total = views[0].float() if out.dtype in _HALF else views[0].clone()
        for view in views[1:]:
            total.add_(view)
        out.copy_(total)

    def _size_cell(self, rank: int, parity: int) -> int:
        return (self._offset + rank * self._stride + _SIZES) // 8 + parity

    def _views_of(self, numel: int, dtype: torch.dtype) -> Views:
        views = self._views.get((numel, dtype))
        if views is None:
            if len(self._views) >= _MAX_CACHED_SHAPES:  # prefill lengths vary without limit
                self._views.clear()
            views = tuple(
                tuple(self._view(rank, parity, numel, dtype) for rank in range(self.size)) for parity in (0, 1)
            )
            self._views[numel, dtype] = views
        return views

    def _view(self, rank: int, parity: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        start = self._offset + rank * self._stride + COLLECTIVE_HEADER_BYTES + parity * self._buffer_bytes
        return torch.frombuffer(self._segment.view, dtype=dtype, count=numel, offset=start)


class KernelCommunicator(SharedMemoryCommunicator):
    """Shared-memory collectives with bfloat16 sums by our kernel."""

    def __init__(self, seat: GroupSeat, kernels: Bfloat16Kernels) -> None:
        super().__init__(seat)
        self._kernels = kernels

    def _reduce(self, x: torch.Tensor) -> None:
        if x.dtype is not torch.bfloat16 or not x.is_contiguous() or x.nbytes > self._buffer_bytes:
            super()._reduce(x)
            return
        while not self._kernels.all_reduce(self.collectives, x):
            self._line.beat()
            tag, parity = self.collectives.tag + 1, self.collectives.rounds & 1
            self._wait_for_peers(tag)
            self._require_sizes(tag, parity, x.nbytes)
