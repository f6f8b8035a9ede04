"""Collectives over shared memory: exact sums, the same bits on all ranks, and errors that name the culprit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from services.compute.backends.collectives import GroupSeat
from services.compute.backends.cpu.backend import open_cpu
from services.compute.backends.cpu.shared_memory import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    SharedMemoryCommunicator,
)
from services.compute.ranks.config import COLLECTIVE_HEADER_BYTES
from services.compute.ranks.futex import Patience
from services.compute.ranks.line import RankLine, control_bytes
from services.compute.ranks.segment import Segment

BUFFER = 1024


def run_group(size: int, body: Callable[[SharedMemoryCommunicator], Any], timeout_s: float = 120.0) -> list[Any]:
    """Run `body` on every rank of a group of threads; return results or the exceptions."""
    segment = Segment.create("test", 4096 + size * (COLLECTIVE_HEADER_BYTES + 2 * BUFFER))
    assert control_bytes(size) <= 4096
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        line = RankLine(segment, 0, rank)
        seat = GroupSeat(rank, size, line, segment, 4096, BUFFER, Patience(0.0002, True), timeout_s)
        comm = open_cpu(torch.bfloat16).join(seat)
        assert isinstance(comm, SharedMemoryCommunicator)
        try:
            results[rank] = body(comm)
        except (RuntimeError, ValueError) as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1,), (7, 5), (3, 700)])  # the last takes several rounds
def test_all_reduce_sums_in_fp32_and_agrees_bitwise(size: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(size)
    inputs = [[torch.randn(shape, generator=generator).to(dtype) for _ in range(size)] for _ in range(5)]
    outputs = run_group(size, lambda comm: [comm.all_reduce(step[comm.rank].clone()) for step in inputs])
    for i, step in enumerate(inputs):
        total = step[0].float()
        for x in step[1:]:
            total = total + x.float()
        for rank in range(size):
            assert torch.equal(outputs[rank][i], total.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_reduce_works_in_place_also_on_strided_tensors(dtype: torch.dtype) -> None:
    def body(comm: SharedMemoryCommunicator) -> torch.Tensor:
        base = torch.full((4, 6), float(comm.rank + 1), dtype=dtype)
        assert comm.all_reduce(base[:, ::2]).data_ptr() == base.data_ptr()
        return base

    for base in run_group(2, body):
        assert torch.equal(base[:, ::2], torch.full((4, 3), 3.0, dtype=dtype))
        assert set(base[:, 1::2].flatten().tolist()) <= {1.0, 2.0}


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (2, 5), (900,)])
def test_all_gather_stacks_in_rank_order(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    inputs = torch.stack([torch.arange(shape[0] * (shape[1:] or (1,))[0]).view(shape) + r for r in range(3)])
    inputs = inputs.to(dtype)
    for gathered in run_group(3, lambda comm: comm.all_gather(inputs[comm.rank])):
        assert torch.equal(gathered, inputs)
        assert gathered.dtype == dtype


def test_many_small_collectives_never_mix() -> None:
    def body(comm: SharedMemoryCommunicator) -> bool:
        for step in range(40):
            comm.begin_step(step)
            for i in range(5):
                x = torch.full((1 + (step + i) % 9,), float(step * 10 + i + comm.rank))
                if not torch.equal(comm.all_reduce(x), torch.full_like(x, 2.0 * (step * 10 + i) + 1)):
                    return False
        return True

    assert run_group(2, body) == [True, True]


def test_timeout_names_the_missing_rank_and_its_position() -> None:
    def body(comm: SharedMemoryCommunicator) -> None:
        comm.begin_step(7)
        comm.all_reduce(torch.ones(3))
        if comm.rank != 2:
            comm.all_reduce(torch.ones(3))

    first, second, third = run_group(3, body, timeout_s=3.0)
    assert third is None
    for error in (first, second):
        assert isinstance(error, CollectiveTimeoutError)
        assert error.missing == (2,)
        assert "at step 7, collective 2: rank 2 is at step 7, collective 1" in str(error)


def test_different_sizes_are_an_error_not_garbage() -> None:
    outcomes = run_group(2, lambda comm: comm.all_reduce(torch.ones(4 + comm.rank)))
    assert all(isinstance(outcome, CollectiveMismatchError) for outcome in outcomes)


def test_steps_must_rise() -> None:
    def body(comm: SharedMemoryCommunicator) -> None:
        comm.begin_step(3)
        comm.begin_step(3)

    assert all(isinstance(outcome, ValueError) for outcome in run_group(2, body))
