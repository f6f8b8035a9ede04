"""Connects the ranks of a group, through the server's segment or through their backend's process group.

Every rank has attached the segment through the server's /proc before, so all ranks run on the server's machine.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from services.compute.backends.base import Backend
from services.compute.backends.collectives import GroupSeat, StepCommunicator
from services.compute.ranks.config import RankGroupConfig
from services.worker.rank.link import ServerLink


def join_group(link: ServerLink, config: RankGroupConfig, rank: int, backend: Backend) -> StepCommunicator:
    """Return the group's collectives."""
    if config.ranks > 1 and backend.process_group is not None:
        dist.init_process_group(backend.process_group, timeout=timedelta(seconds=config.start_timeout_s))
    seat = GroupSeat(
        rank,
        config.ranks,
        link.line,
        link.segment,
        link.layout.collectives,
        link.layout.collective_bytes,
        link.patience,
        config.collective_timeout_s,
    )
    return backend.join(seat)
