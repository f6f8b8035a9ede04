"""Measures the memory of every process over time, and the growth of each kind of process."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import psutil

from tests.stack import RunningStack

WARM_UP_S = 30.0  # a new process fills its caches and pools, which is not growth
_EVERY_S = 5.0
_CHILDREN = {  # in this order: the launcher's command line also contains the module of the ranks
    "services.worker.process.launch": "rank launcher",
    "services.worker.rank": "rank",
}
_MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """The memory of one process at one time."""

    kind: str
    life: tuple[int, float]  # pid and start time, which differ after a restart
    at: float  # unix time
    pss: int  # bytes; shared pages count in proportion
    private: int  # bytes that no other process shares (USS)


@dataclass(frozen=True)
class Growth:
    """The memory of one kind of process, over all its lives.

    The level is PSS. The growth is measured on private memory, since a process's share of shared pages rises when
    another process ends.
    """

    kind: str
    lives: int
    last_mib: float  # PSS: the largest last sample of any life
    mib_per_hour: float | None  # private memory; None: no life was long enough
    observed_s: float  # time after warm-up that the slope is fitted over


@dataclass
class Memory:
    """Collects samples of a stack until cancelled."""

    stack: RunningStack
    samples: list[Sample] = field(default_factory=list)

    async def watch(self) -> None:
        """Take samples at intervals, in a thread, so that clients are not delayed."""
        while True:
            self.samples += await asyncio.to_thread(lambda: list(take(self.stack)))
            await asyncio.sleep(_EVERY_S)


def take(stack: RunningStack) -> Iterator[Sample]:
    """A sample of every process of the stack; skips processes that end meanwhile."""
    for name, pid in stack.state["processes"].items():
        try:
            process = psutil.Process(pid)
            family = [(re.sub(r"-\d+$", "", name), process)]
            family += [(_kind_of_child(child), child) for child in process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
        for kind, member in family:
            try:
                life = (member.pid, member.create_time())
                memory = member.memory_full_info()
                yield Sample(kind, life, time.time(), memory.pss, memory.uss)
            except psutil.NoSuchProcess:
                continue


def _kind_of_child(process: psutil.Process) -> str:
    command = process.cmdline()
    for module, kind in _CHILDREN.items():
        if module in command:
            return kind
    return "other"


def growth(samples: Sequence[Sample]) -> list[Growth]:
    """One row per kind of process."""
    kinds = sorted({sample.kind for sample in samples})
    return [_growth_of(kind, [sample for sample in samples if sample.kind == kind]) for kind in kinds]


def _growth_of(kind: str, samples: list[Sample]) -> Growth:
    lives: dict[tuple[int, float], list[Sample]] = {}
    for sample in samples:
        lives.setdefault(sample.life, []).append(sample)
    settled = [[s for s in life if s.at - s.life[1] >= WARM_UP_S] for life in lives.values()]
    return Growth(
        kind=kind,
        lives=len(lives),
        last_mib=max(life[-1].pss for life in lives.values()) / _MIB,
        mib_per_hour=slope([[(s.at, s.private / _MIB) for s in life] for life in settled]),
        observed_s=sum(life[-1].at - life[0].at for life in settled if life),
    )


def slope(lives: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """The common slope per hour of series of (seconds, value) with different levels, by least squares.

    A restart changes the level but not the slope, so that it neither looks like growth nor hides growth.
    """
    across, along = 0.0, 0.0
    for life in lives:
        if not life:
            continue
        mean_t = sum(t for t, _ in life) / len(life)
        mean_v = sum(v for _, v in life) / len(life)
        across += sum((t - mean_t) * (v - mean_v) for t, v in life)
        along += sum((t - mean_t) ** 2 for t, _ in life)
    return across / along * 3_600 if along else None
