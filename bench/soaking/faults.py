"""What is done to a running installation, in an order fixed by a seed."""

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
    """What happens; the names are those of the report."""

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
    """One fault and whom it meets: the name of a process of the stack."""

    kind: FaultKind
    victim: str

    @property
    def replaces(self) -> bool:
        """Whether recovery means another process; a stopped server goes on when it is continued."""
        return self.kind is not FaultKind.STOP_WORKER


@dataclass(frozen=True)
class Struck:
    """A fault that happened, to these processes."""

    fault: Fault
    pids: tuple[int, ...]
    at_ns: int  # just before, by time.time_ns

    def release(self) -> None:
        """Continue a stopped server. A stopped rank stays: finding it is the worker's business."""
        if self.fault.kind is FaultKind.STOP_WORKER:
            with contextlib.suppress(ProcessLookupError):  # what stood still for too long was replaced
                os.kill(self.pids[0], signal.SIGCONT)


def schedule(seed: int, workers: int, kinds: Sequence[FaultKind] = tuple(FaultKind)) -> Iterator[Fault]:
    """Faults without end. Each kind comes once before any comes again, so that a short run meets all of them."""
    rng = random.Random(seed)
    while True:
        for kind in rng.sample(kinds, len(kinds)):
            worker = f"worker-{rng.randrange(workers)}"
            yield Fault(kind, _SERVICES.get(kind, worker))


def pids_of(stack: RunningStack, fault: Fault) -> tuple[int, ...]:
    """The processes that a fault meets, as they are now."""
    if fault.kind in _OF_RANKS:
        return tuple(stack.rank_pids(fault.victim)[:1])
    return (stack.pid_of(fault.victim),)


def strike(stack: RunningStack, fault: Fault) -> Struck:
    """Let it happen; raises ProcessLookupError when the victim is not there."""
    pids = pids_of(stack, fault)
    if not pids:
        raise ProcessLookupError(f"{fault.victim} has no rank")
    at_ns = time.time_ns()
    os.kill(pids[0], signal.SIGSTOP if fault.kind in _STOPS else signal.SIGKILL)
    return Struck(fault, pids, at_ns)
