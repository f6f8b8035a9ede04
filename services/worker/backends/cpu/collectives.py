"""Collectives that kernels take part in by themselves."""

from __future__ import annotations

import sys

from services.worker.backends.collectives import LoneRank
from services.worker.kernels.bfloat16 import Collectives
from services.worker.transport.control import RankLine


class ReplayedCollectives:
    """A communicator whose sums a replayed step makes without asking Python."""

    collectives: Collectives


class ReplayedLoneRank(LoneRank, ReplayedCollectives):
    """The group of one: replayed steps show that it lives, too."""

    def __init__(self, line: RankLine) -> None:
        super().__init__(line)
        self.collectives = Collectives(rank=0, ranks=1, room=sys.maxsize, beats=line.beats_address)
