"""Measures the collectives inside the ranks; `bench.collectives` starts it with torchrun.

Our all-reduces and gloo's alternate, so that drift of the machine affects both alike.
Rank 0 prints its report as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from bench.decode_share import DecodeStep, measure_decode, predict_speedup
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
_PREDICTED_RANKS = (2, 4, 8)


@dataclass(frozen=True, slots=True)
class CollectiveTiming:
    """Microseconds of one all-reduce of `n_bytes` in bfloat16, on rank 0."""

    n_bytes: int
    shared_memory_p50: float
    shared_memory_p99: float
    gloo_p50: float
    gloo_p99: float


@dataclass(frozen=True, slots=True)
class Report:
    """The measurements of one run."""

    ranks: int
    timings: list[CollectiveTiming]
    step: DecodeStep | None
    share: float | None  # communication's share of a decode step
    speedup: dict[int, float]  # by ranks, over one rank


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


def run(options: argparse.Namespace) -> Report:
    """Measure. All ranks of the group call it; only rank 0's report is used."""
    config = RankGroupConfig(
        model_path=str(options.model or ""),
        ranks=dist.get_world_size(),
        dtype=options.dtype,
        kv_tokens=options.batch * (options.prompt_tokens + options.decode_steps + 16),
        max_running=options.batch,
        max_model_len=options.prompt_tokens + options.decode_steps + 1,
    )
    comm = join(config, share_memory(config))
    timings = [time_all_reduce(comm, kib << 10, options.repeats) for kib in options.kib]
    step = measure_decode(config, comm, options.batch, options.prompt_tokens) if options.model else None
    share = step.share if step else options.share
    speedup = {} if share is None else {n: predict_speedup(share, config.ranks, n) for n in _PREDICTED_RANKS}
    dist.barrier()
    return Report(config.ranks, timings, step, share, speedup)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 16, 64, 256, 1024, 4096])
    parser.add_argument("--repeats", type=int, default=300)
    parser.add_argument("--model", type=Path, help="checkpoint folder whose decode steps are measured")
    parser.add_argument("--share", type=float, help="instead: communication's share of a decode step")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--decode-steps", type=int, default=64)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print the report on rank 0."""
    die_with_parent()
    options = _parser().parse_args(arguments)
    torch.set_num_threads(max(1, usable_cores() // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    try:
        report = run(options)
        if dist.get_rank() == 0:
            print(json.dumps(asdict(report)))
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
