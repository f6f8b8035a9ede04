"""Sums of small tensors over ranks through symmetric memory: each rank reads the others' numbers by one kernel."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from services.compute.backends.collectives import Communicator

logger = logging.getLogger(__name__)

MOST_BYTES = 512 << 10  # of a sum; NCCL's rings are faster for more
_ALIGNED = 16  # bytes that the kernel reads at a time
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest number: partial sums are rounded, too


class OneShot(Protocol):
    """A device's sums. They are enqueued, and may be captured."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks, bitwise equal on all of them: contiguous, at most MOST_BYTES."""
        ...


class SymmetricMemory:
    """torch's kernel over a buffer that the ranks of a process group map into each other's memory."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        """Every rank calls it. Raises RuntimeError where GPUs cannot read each other's memory."""
        # Imported here, because torch without CUDA may lack it.
        from torch.distributed import _symmetric_memory

        self._group_name = group.group_name
        self._buffer = _symmetric_memory.empty(MOST_BYTES, dtype=torch.uint8, device=device)
        _symmetric_memory.rendezvous(self._buffer, group)

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over the ranks."""
        place = self._buffer[: x.nbytes].view(x.dtype)
        found: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, x.view(-1), "sum", self._group_name)
        return found.view(x.shape)


def serves(x: Tensor) -> bool:
    """Whether a `OneShot` sums tensors such as `x`."""
    return x.dtype in _TOLERANCE and x.is_contiguous() and 0 < x.nbytes <= MOST_BYTES and x.nbytes % _ALIGNED == 0


def open_one_shot(comm: Communicator, make: Callable[[], OneShot], device: torch.device) -> OneShot | None:
    """Return what `make` makes if its sums are those of `comm` on all ranks; otherwise None on all, and warn.

    Every rank of `comm`, which must not sum by it yet, calls it.
    """
    sums: list[OneShot] = []
    problem = _failure(lambda: sums.append(make()))
    if not _anywhere(problem, comm, device):
        problem = _failure(lambda: _compare(sums[0], comm, device))
        if not _anywhere(problem, comm, device):
            logger.info("small sums over the ranks: one-shot, through symmetric memory")
            return sums[0]
    logger.warning("all sums over the ranks are NCCL's: symmetric memory: %s", problem or "it fails on another rank")
    return None


def _compare(sums: OneShot, comm: Communicator, device: torch.device) -> None:
    """Raise RuntimeError if a sum fails, or differs from that of `comm` or between ranks.

    The collectives of `comm` are called in any case, because the other ranks wait in them.
    """
    worst, same = 0.0, True
    failures: list[str] = []
    for dtype, tolerance in _TOLERANCE.items():
        for n_bytes in (_ALIGNED, MOST_BYTES // 2 + _ALIGNED, MOST_BYTES, _ALIGNED):  # the buffer is used again
            generator = torch.Generator().manual_seed(comm.rank)
            x = torch.randn(n_bytes // dtype.itemsize, generator=generator).to(device, dtype)
            found = torch.full_like(x, torch.nan)
            failure = _failure(partial(_sum_into, found, sums, x))
            failures += [failure] if failure else []
            exact = comm.all_reduce(x.clone())
            error = ((found - exact).abs().max() / exact.abs().max()).item() / tolerance
            worst = max(worst, math.inf if math.isnan(error) else error)
            everywhere = comm.all_gather(found)
            same = same and bool(torch.equal(everywhere, found.expand_as(everywhere)))
    if failures:
        raise RuntimeError(failures[0])
    if worst > 1:
        raise RuntimeError(f"its sums differ from NCCL's by {worst:.2g} times what is allowed")
    if not same:
        raise RuntimeError("its sums differ between ranks")


def _sum_into(out: Tensor, sums: OneShot, x: Tensor) -> None:
    out.copy_(sums.sum(x))


def _failure(work: Callable[[], object]) -> str | None:
    """Return why `work` fails, or None."""
    try:
        work()
    except (RuntimeError, ImportError, AttributeError) as error:  # AttributeError: torch has no such operation
        return str(error) or type(error).__name__
    return None


def _anywhere(problem: str | None, comm: Communicator, device: torch.device) -> bool:
    """Whether any rank has a problem."""
    return bool(comm.all_gather(torch.tensor([problem is not None], dtype=torch.int32, device=device)).any())
