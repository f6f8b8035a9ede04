"""Collectives between CUDA ranks: torch.distributed over NCCL."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

from services.compute.ranks.line import RankLine, RankState


class NcclCommunicator:
    """Implements `Communicator` on the default process group, which must be NCCL.

    NCCL returns the same bits on every rank, but chooses the order of the sum itself: results are reproducible for
    one topology and message size only. Collectives may be captured: every rank captures the same steps in the same
    order, after it has computed each once.
    """

    def __init__(self, line: RankLine, timeout_s: float) -> None:
        if not dist.is_initialized():
            raise RuntimeError("NcclCommunicator needs an initialised default process group")
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._line = line
        self._timeout = timedelta(seconds=timeout_s)
        self._elapsed_ns = 0
        self._group = dist.new_group(backend="nccl", timeout=self._timeout)

    def begin_step(self, step: int) -> None:
        """Publish that the rank computes; NCCL tags its collectives itself."""
        self._line.enter(RankState.COMPUTING)

    def take_elapsed_us(self) -> int:
        """Return the host's microseconds for enqueueing collectives, without the device's time, which overlaps."""
        elapsed, self._elapsed_ns = self._elapsed_ns, 0
        return elapsed // 1000

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; returns `x`."""
        started = time.perf_counter_ns()
        dist.all_reduce(x, group=self._group)
        self._account(started)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack every rank's `x`: [...] -> [size, ...], the same shape and dtype on every rank."""
        started = time.perf_counter_ns()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=self._group)
        self._account(started)
        return out

    def _account(self, started_ns: int) -> None:
        self._line.beat()
        self._elapsed_ns += time.perf_counter_ns() - started_ns
