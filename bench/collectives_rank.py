"""Measures the collectives inside the ranks; `bench.collectives` starts it with torchrun.

Our all-reduces and gloo's alternate, so that drift of the machine affects both alike.
Rank 0 prints its times as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np
import torch
import torch.distributed as dist

from services.common.cores import usable_cores
from services.common.lifeline import die_with_parent
from services.compute.backends.collectives import GroupSeat, StepCommunicator
from services.compute.backends.opening import open_backend
from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.futex import Patience
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment
from services.worker.protocol.rank_config import GroupLayout

_SPIN_S = 0.001
_WARM_UP = 20
_KIB = (4, 16, 64, 256, 1024, 4096)


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """Microseconds of one all-reduce of `n_bytes` in bfloat16, on rank 0."""

    n_bytes: int
    shared_memory_p50: float
    shared_memory_p99: float
    gloo_p50: float
    gloo_p99: float


def time_all_reduce(comm: StepCommunicator, n_bytes: int, repeats: int) -> CollectiveTiming:
    """Measure both implementations on a bfloat16 tensor of `n_bytes`, in alternation."""
    x = torch.zeros(n_bytes // 2, dtype=torch.bfloat16)
    ours, gloo = [], []
    for _ in range(_WARM_UP + repeats):
        ours.append(_microseconds(lambda: comm.all_reduce(x)))
        gloo.append(_microseconds(lambda: dist.all_reduce(x)))
    cuts = [np.percentile(values[_WARM_UP:], (50, 99)).tolist() for values in (ours, gloo)]
    return CollectiveTiming(n_bytes, *cuts[0], *cuts[1])


def _microseconds(collective: Callable[[], object]) -> float:
    began = time.perf_counter_ns()
    collective()
    return (time.perf_counter_ns() - began) / 1000


def share_memory(config: RankGroupConfig) -> Segment:
    """The group's segment: rank 0 creates it, the others map it. Needs a process group."""
    where: list[tuple[int, int] | None] = [None]
    segment = None
    if dist.get_rank() == 0:
        segment = Segment.create("bench", GroupLayout.of(config).size)
        where = [(os.getpid(), segment.fd)]
    dist.broadcast_object_list(where, src=0)
    assert where[0] is not None
    segment = segment or Segment.attach(*where[0])
    dist.barrier()  # rank 0 must not exit before all ranks have mapped it
    return segment


def join(config: RankGroupConfig, segment: Segment) -> StepCommunicator:
    """Join the collectives that workers use."""
    layout, rank = GroupLayout.of(config), dist.get_rank()
    line = RankLine(segment, layout.control, rank)
    # Count a server process, although there is none here, so that ranks wait as they do in a worker.
    patience = Patience.choose(config.ranks + 1, usable_cores(), _SPIN_S)
    seat = GroupSeat(
        rank,
        config.ranks,
        line,
        segment,
        layout.collectives,
        layout.collective_bytes,
        patience,
        config.collective_timeout_s,
    )
    return open_backend(getattr(torch, config.dtype), torch.device("cpu")).join(seat)


def run(repeats: int) -> list[CollectiveTiming]:
    """Measure. All ranks of the group call it; only rank 0's times are used."""
    config = RankGroupConfig(model_path="", ranks=dist.get_world_size(), dtype="bfloat16", kv_tokens=16)
    comm = join(config, share_memory(config))
    timings = [time_all_reduce(comm, kib << 10, repeats) for kib in _KIB]
    dist.barrier()
    return timings


def main() -> int:
    """Print the times of rank 0; the argument is the number of all-reduces of each size."""
    die_with_parent()
    torch.set_num_threads(max(1, usable_cores() // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    try:
        timings = run(int(sys.argv[1]))
        if dist.get_rank() == 0:
            print(json.dumps([asdict(timing) for timing in timings]))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
