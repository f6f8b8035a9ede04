"""Faults in a running installation, in an order that a seed fixes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tests.stack import RunningStack


class FaultKind(StrEnum):
    """Kinds of faults, with their names in the report."""

    KILL_RANK = "kill rank"
    STOP_RANK = "stop rank"
    KILL_WORKER = "kill worker server"
    STOP_WORKER = "stop worker server"
    KILL_REDIS = "kill redis"
    KILL_COORDINATOR = "kill kv-coordinator"
    KILL_ROUTER = "kill router"


_SERVICES = {
    FaultKind.KILL_REDIS: "redis",
    FaultKind.KILL_COORDINATOR: "kv-coordinator",
    FaultKind.KILL_ROUTER: "router",
}
_OF_RANKS = (FaultKind.KILL_RANK, FaultKind.STOP_RANK)
_STOPS = (FaultKind.STOP_RANK, FaultKind.STOP_WORKER)


@dataclass(frozen=True)
class Fault:
    """One fault and its victim, the name of a process of the stack."""

    kind: FaultKind
    victim: str

    @property
    def replaces(self) -> bool:
        """Whether recovery needs a new process. A stopped server needs none: it is continued."""
        return self.kind is not FaultKind.STOP_WORKER


@dataclass(frozen=True)
class Struck:
    """A fault that has happened, and the processes that it hit."""

    fault: Fault
    pids: tuple[int, ...]
    at_ns: int  # just before the fault, by time.time_ns

    def release(self) -> None:
        """Continue a stopped server. A stopped rank stays stopped: the worker must detect it."""
        if self.fault.kind is FaultKind.STOP_WORKER:
            with contextlib.suppress(ProcessLookupError):  # it was stopped for too long and has been replaced
                os.kill(self.pids[0], signal.SIGCONT)


def schedule(seed: int, workers: int, kinds: Sequence[FaultKind] = tuple(FaultKind)) -> Iterator[Fault]:
    """An endless sequence of faults. All kinds come before any repeats, so that a short run has each of them."""
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            worker = f"worker-{rng.randrange(workers)}"
            yield Fault(kind, _SERVICES.get(kind, worker))


def pids_of(stack: RunningStack, fault: Fault) -> tuple[int, ...]:
    """The current processes that a fault hits."""
    if fault.kind in _OF_RANKS:
        return tuple(stack.rank_pids(fault.victim)[:1])
    return (stack.pid_of(fault.victim),)


def strike(stack: RunningStack, fault: Fault) -> Struck:
    """Cause the fault; raises ProcessLookupError if the victim does not exist."""
    pids = pids_of(stack, fault)
    if not pids:
        raise ProcessLookupError(f"{fault.victim} has no rank")
    at_ns = time.time_ns()
    os.kill(pids[0], signal.SIGSTOP if fault.kind in _STOPS else signal.SIGKILL)
    return Struck(fault, pids, at_ns)
