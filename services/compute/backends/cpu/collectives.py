"""Collectives that replayed steps call without Python."""

from __future__ import annotations

import sys

from services.compute.backends.collectives import LoneRank
from services.compute.kernels.bfloat16 import Collectives
from services.compute.ranks.line import RankLine


class ReplayedCollectives:
    """A communicator whose sums a replayed step computes without Python."""

    collectives: Collectives


class ReplayedLoneRank(LoneRank, ReplayedCollectives):
    """The group of one; replayed steps also raise its heartbeat."""

    def __init__(self, line: RankLine) -> None:
        super().__init__(line)
        self.collectives = Collectives(rank=0, ranks=1, room=sys.maxsize, beats=line.beats_address)
