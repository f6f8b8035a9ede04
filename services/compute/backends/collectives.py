"""Collectives over the ranks of one tensor-parallel group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from services.compute.ranks.futex import Patience
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment


class Communicator(Protocol):
    """Collectives of the model's group.

    Every rank calls the same collectives in the same order. Results are bitwise equal on all ranks. The backend chooses
    the order of a sum.
    """

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the ranks, in place; returns `x`."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Stack every rank's `x`: [...] -> [size, ...], the same shape and dtype on every rank."""


class StepCommunicator(Communicator, Protocol):
    """A communicator that knows the current step and measures its own time, for a rank's loop."""

    def begin_step(self, step: int) -> None:
        """Tag the collectives from here on with `step`."""

    def take_elapsed_us(self) -> int:
        """Return the microseconds spent in collectives since the last call."""


@dataclass(frozen=True, slots=True)
class GroupSeat:
    """A rank's position in its group, and the memory shared with the other ranks."""

    rank: int
    size: int
    line: RankLine  # the rank's heartbeat
    segment: Segment
    offset: int  # offset of the collectives in the segment
    buffer_bytes: int  # per rank and parity
    patience: Patience
    timeout_s: float


class SingleRank:
    """The group of one."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`: the sum over one rank."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` with a leading rank dimension of 1."""
        return x.unsqueeze(0)


class LoneRank(SingleRank):
    """The group of one; its collectives only raise the heartbeat during the forward pass."""

    def __init__(self, line: RankLine) -> None:
        self._line = line

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`: the sum over one rank."""
        self._line.beat()
        return x

    def begin_step(self, step: int) -> None:
        """Does nothing."""

    def take_elapsed_us(self) -> int:
        """Return 0."""
        return 0
