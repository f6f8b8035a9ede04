"""How the ranks of a group find each other: torchrun's environment, gloo, then their backend's collectives."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from services.worker.backends.base import Backend
from services.worker.backends.collectives import GroupSeat, StepCommunicator
from services.worker.protocol.rank_config import RankGroupConfig
from services.worker.rank.link import ServerLink


def join_group(link: ServerLink, config: RankGroupConfig, rank: int, backend: Backend) -> StepCommunicator:
    """Meet the other ranks and return the group's collectives. Raises RuntimeError when they are not what we need."""
    if config.ranks > 1:
        dist.init_process_group(backend.process_group, timeout=timedelta(seconds=config.start_timeout_s))
        if dist.get_world_size() != config.ranks:
            raise RuntimeError(f"torchrun started {dist.get_world_size()} ranks, {config.ranks} are configured")
        _require_one_machine()
        if not backend.keeps_process_group:
            dist.destroy_process_group()
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


def _require_one_machine() -> None:
    """Ranks share memory with the server, so they must run under the same kernel."""
    mine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if set(everyone) != {mine}:
        raise RuntimeError(f"the ranks of a group must run on one machine; boot ids are {everyone}")
