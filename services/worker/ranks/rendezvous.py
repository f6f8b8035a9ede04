"""How the ranks of a group find each other: torchrun's environment, gloo for control, then their own collectives."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from services.worker.kernels.bfloat16 import open_kernels
from services.worker.parallel.nccl import NcclCommunicator
from services.worker.parallel.shared_memory import SharedMemoryCommunicator
from services.worker.ranks.communication import LoneRank, StepCommunicator
from services.worker.ranks.link import ServerLink
from services.worker.transport.settings import RankGroupConfig


def join_group(link: ServerLink, config: RankGroupConfig, rank: int, device: torch.device) -> StepCommunicator:
    """Meet the other ranks and return the group's collectives. Raises RuntimeError when they are not what we need."""
    if config.ranks == 1:
        return LoneRank(link.line)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=config.start_timeout_s))
    if dist.get_world_size() != config.ranks:
        raise RuntimeError(f"torchrun started {dist.get_world_size()} ranks, {config.ranks} are configured")
    _require_one_machine()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        return NcclCommunicator(link.line, config.collective_timeout_s)
    dist.destroy_process_group()  # from here on shared memory does everything
    return SharedMemoryCommunicator(
        link.segment,
        link.layout.collectives,
        link.layout.collective_bytes,
        rank,
        config.ranks,
        link.line,
        link.patience,
        config.collective_timeout_s,
        open_kernels(getattr(torch, config.dtype), device),
    )


def _require_one_machine() -> None:
    """Ranks share memory with the server, so they must run under the same kernel."""
    mine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    everyone: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    if set(everyone) != {mine}:
        raise RuntimeError(f"the ranks of a group must run on one machine; boot ids are {everyone}")
