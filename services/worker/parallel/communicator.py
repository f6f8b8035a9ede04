"""What the model asks of its tensor-parallel group."""

from __future__ import annotations

from typing import Protocol

import torch

from services.worker.kernels.bfloat16 import Collectives


class Communicator(Protocol):
    """Collectives over the ranks of one tensor-parallel group.

    Every rank calls the same collectives in the same order. Results are bitwise equal on all ranks: sums are
    taken in fp32 in rank order, whatever the dtype of the tensor.
    """

    rank: int
    size: int

    @property
    def collectives(self) -> Collectives | None:
        """What kernels sum with by themselves between others; None: they ask."""
        ...

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; returns `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack every rank's `x`: [...] -> [size, ...], the same shape and dtype on every rank."""
        ...


class SingleRank:
    """The group of one."""

    rank = 0
    size = 1
    collectives: Collectives | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`: the sum over one rank."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with a leading rank dimension of 1."""
        return x.unsqueeze(0)
