"""Rank groups of stand-in decoders under their real launcher, and nothing left of them afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.ranks.config import RankGroupConfig
from services.worker.engine.process_info import ProcessInfo
from services.worker.process.launcher import Launcher
from services.worker.process.rank_group import GroupStarted, RankGroup
from services.worker.protocol.plan import Admission, Chunk, StepPlan, StepResult
from tests.forked_ranks import ForkedRanks

STANDIN = "tests.integration.worker_ranks.standin_rank"
MakeGroup = Callable[..., RankGroup]


@pytest.fixture
async def make_group() -> AsyncIterator[MakeGroup]:
    groups: list[RankGroup] = []

    def make(ranks: int = 2, model: str = "well-behaved", **fields: object) -> RankGroup:
        options = {"kv_tokens": 1024, "max_model_len": 256, "dtype": "float32", "rank_module": STANDIN} | fields
        groups.append(RankGroup(RankGroupConfig(model, ranks=ranks, **options)))  # type: ignore[arg-type]
        return groups[-1]

    yield make
    for group in groups:
        await group.stop()


@pytest.fixture
def make_forked_group(make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch) -> MakeGroup:
    """The same without a launcher, for tests in which none takes part."""
    monkeypatch.setattr(Launcher, "spawn", ForkedRanks.spawn)
    return make_group


def pids_of(started: GroupStarted) -> list[int]:
    """The ranks, then their parent: torchrun, or this process for a single one."""
    pids = [rank.pid for rank in started.ranks]
    stat = Path(f"/proc/{pids[0]}/stat").read_text()
    return [*pids, int(stat[stat.rindex(")") + 2 :].split()[1])]


def alive(pids: list[int]) -> list[int]:
    """Those that still run; a zombie does not."""
    infos = {pid: ProcessInfo.read(pid) for pid in pids}
    return [pid for pid, info in infos.items() if info is not None and info.state != "Z"]


async def wait_gone(pids: list[int], seconds: float = 60.0) -> None:
    """Fail unless all processes end in time."""
    async with asyncio.timeout(seconds):
        while alive(pids):  # noqa: ASYNC110 - processes of others send no event
            await asyncio.sleep(0.02)


class RankConversation:
    """Submits steps of a few requests and collects their tokens."""

    def __init__(self, group: RankGroup, prompts: list[list[int]], params: Sampling | None = None) -> None:
        self._group, self._prompts = group, prompts
        self._params = params or Sampling()
        self.step = 0
        self.results: list[StepResult] = []
        self._arrived: asyncio.Queue[StepResult] = asyncio.Queue()
        group.on_result = self._arrived.put_nowait
        self._lengths = [len(prompt) for prompt in prompts]

    def submit(self) -> None:
        """Plan the next step: all prompts at once, then one token each."""
        if self.step == 0:
            admissions = tuple(
                Admission(slot, self._params, tuple(prompt), len(prompt)) for slot, prompt in enumerate(self._prompts)
            )
            chunks = tuple(
                Chunk(slot, 0, len(prompt), True, (2 * slot + 1, 2 * slot + 2))
                for slot, prompt in enumerate(self._prompts)
            )
            plan = StepPlan(0, (), admissions, chunks)
        else:
            chunks = tuple(Chunk(s, length, 1, True) for s, length in enumerate(self._lengths))
            self._lengths = [length + 1 for length in self._lengths]
            plan = StepPlan(self.step, chunks=chunks)
        self.step += 1
        self._group.submit(plan)

    async def result(self) -> StepResult:
        """Wait for the next result."""
        async with asyncio.timeout(60):
            self.results.append(await self._arrived.get())
        return self.results[-1]

    async def run(self, steps: int) -> list[tuple[int, ...]]:
        """Compute some steps with two plans in flight; return each request's tokens."""
        self.submit()
        for _ in range(steps - 1):
            self.submit()
            await self.result()
        await self.result()
        return list(zip(*([record.token_ids[0] for record in result.slots] for result in self.results), strict=True))
