"""Small sums through symmetric memory: used only where they pass their check on every rank. Ranks are threads."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from services.compute.backends.collectives import Communicator, GroupSeat
from services.compute.backends.cuda import backend
from services.compute.backends.cuda.backend import CudaBackend
from services.compute.backends.cuda.nccl import NcclCommunicator
from services.compute.backends.cuda.one_shot import MOST_BYTES, OneShot, open_one_shot, serves
from services.compute.ranks.line import RankLine
from services.compute.ranks.segment import Segment
from tests.unit.compute.model.harness import run_ranks

CPU = torch.device("cpu")


class Exact:
    """Sums as the group does."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.n_sums = comm, 0

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        self.n_sums += 1
        return self.comm.all_reduce(x.clone())


class Wrong(Exact):
    """Its sums differ from the group's, on all ranks by as much."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return super().sum(x) * 1.1


class WrongOnOneRank(Exact):
    """Its sums differ from the group's on the last rank."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return super().sum(x) * (1.1 if self.comm.rank else 1)


class OrderedByRank(Exact):
    """Sums that are right but for a last bit, which the ranks disagree on."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        found = super().sum(x)
        found[0] += found[0].abs() * torch.finfo(x.dtype).eps * 2 * self.comm.rank
        return found


class NotANumber(Exact):
    """Its sums are not numbers."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return super().sum(x) * torch.nan


class Refused(Exact):
    """It cannot be opened on one rank."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__(comm)
        if comm.rank:
            raise RuntimeError("no access to a peer's memory")


class FailsOnce(Exact):
    """Its second sum fails on one rank, after the others' numbers have come."""

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        found = super().sum(x)
        if self.comm.rank and self.n_sums == 2:
            raise RuntimeError("a launch failed")
        return found


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Wrong, "differ from NCCL's"),
        (WrongOnOneRank, "differ from NCCL's"),
        (NotANumber, "differ from NCCL's"),
        (OrderedByRank, "differ between ranks"),
        (Refused, "no access to a peer's memory"),
        (FailsOnce, "a launch failed"),
    ],
)
def test_what_fails_on_one_rank_is_used_by_none(
    kind: Callable[[Communicator], OneShot], problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert run_ranks(2, lambda comm: open_one_shot(comm, lambda: kind(comm), CPU)) == [None, None]
    assert problem in caplog.text
    assert "all sums over the ranks are NCCL's" in caplog.text


def test_what_agrees_is_used_by_all() -> None:
    found = run_ranks(3, lambda comm: open_one_shot(comm, lambda: Exact(comm), CPU))
    assert all(isinstance(one, Exact) and one.n_sums for one in found)


def test_only_small_aligned_sums_are_served() -> None:
    rows = torch.zeros(64, 4096, dtype=torch.bfloat16)  # 512 KiB
    assert rows.nbytes == MOST_BYTES
    assert serves(rows)
    assert serves(torch.zeros(4))
    for other in (torch.zeros(65, 4096).bfloat16(), rows[:, :64], rows.half(), torch.zeros(5), torch.zeros(0)):
        assert not serves(other)


def communicator(monkeypatch: pytest.MonkeyPatch, by_nccl: list[int]) -> NcclCommunicator:
    """A communicator whose NCCL puts down the sizes of its sums."""

    class Group:
        group_name = "ranks"

    def reduced(x: torch.Tensor, group: Group) -> None:
        by_nccl.append(x.numel())

    dist = "services.compute.backends.cuda.nccl.dist."
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2), ("new_group", Group())):
        monkeypatch.setattr(dist + name, lambda *_, value=value, **__: value)
    monkeypatch.setattr(dist + "all_reduce", reduced)
    return NcclCommunicator(RankLine(Segment.create("test", 4096), 0, 0), 30.0)


def test_small_sums_go_through_symmetric_memory_and_others_through_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubling:
        def sum(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    by_nccl: list[int] = []
    comm, small = communicator(monkeypatch, by_nccl), torch.ones(8)
    comm.all_reduce(small)
    assert by_nccl == [8], "off by default"
    monkeypatch.setattr("services.compute.backends.cuda.nccl.open_one_shot", lambda *_: Doubling())
    comm.use_symmetric_memory(CPU)
    by_nccl.clear()
    assert comm.all_reduce(small) is small
    assert torch.equal(small, torch.full((8,), 2.0)), "in place"
    comm.all_reduce(torch.ones(MOST_BYTES))
    assert by_nccl == [MOST_BYTES]


@pytest.mark.parametrize("one_shot", [False, True])
def test_a_switch_opens_it(one_shot: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[torch.device] = []
    comm = communicator(monkeypatch, [])
    monkeypatch.setattr(comm, "use_symmetric_memory", opened.append)
    monkeypatch.setattr(backend, "NcclCommunicator", lambda *_: comm)
    segment = Segment.create("seat", 4096)
    seat = GroupSeat(0, 2, RankLine(segment, 0, 0), segment, 0, 0, None, 30.0)  # type: ignore[arg-type]
    assert CudaBackend(torch.float32, CPU, triton=False, one_shot=one_shot).join(seat) is comm
    assert opened == ([CPU] if one_shot else [])
