"""What a rank's loop asks of a communicator beyond the collectives themselves."""

from __future__ import annotations

import ctypes
import sys
from typing import Protocol

import torch

from services.worker.kernels.bfloat16 import Collectives
from services.worker.parallel.communicator import Communicator, SingleRank
from services.worker.transport.control import RankLine


class StepCommunicator(Communicator, Protocol):
    """A communicator that knows the current step and accounts for its time."""

    def begin_step(self, step: int) -> None:
        """Tag the collectives from here on with `step`."""
        ...

    def take_elapsed_us(self) -> int:
        """Return the microseconds spent in collectives since the last call."""
        ...


class LoneRank(SingleRank):
    """The group of one. Its collectives cost nothing but still show how far the forward pass got."""

    def __init__(self, line: RankLine | None = None) -> None:
        self._line, self._unseen = line, ctypes.c_uint64()
        beats = ctypes.addressof(self._unseen) if line is None else line.beats_address
        self.collectives = Collectives(rank=0, ranks=1, room=sys.maxsize, beats=beats)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`: the sum over one rank."""
        if self._line is not None:
            self._line.beat()
        return x

    def begin_step(self, step: int) -> None:
        """Nothing to tag."""

    def take_elapsed_us(self) -> int:
        """Return 0."""
        return 0
