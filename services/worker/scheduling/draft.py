"""A step in the making."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.worker.scheduling.plan import Admission, Chunk, StepPlan
from services.worker.scheduling.request import Request

Work = list[tuple[Request, Chunk]]


@dataclass(slots=True)
class Draft:
    """What a plan will contain, and what it may still spend."""

    budget: int  # rows
    work: Work = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    pressed: bool = False  # a running request found no block: nobody new is admitted

    def add(self, request: Request, end: int, sample: bool, new_blocks: tuple[int, ...]) -> None:
        """Compute the request's positions up to `end`, and draw the token there if `sample`."""
        start = request.n_planned
        request.n_planned = end
        request.n_pending += sample
        request.n_in_flight += 1
        self.budget -= end - start
        self.work.append((request, Chunk(request.slot, start, end - start, sample, new_blocks)))

    def finish(self, step: int, released: list[int]) -> StepPlan:
        """The plan for the ranks."""
        chunks = tuple([chunk for _, chunk in self.work])
        return StepPlan(step, tuple(released), tuple(self.admissions), chunks)


class Slots:
    """Which slots are free, and which of them the ranks still have to be told about."""

    def __init__(self, n: int) -> None:
        self.free = list(range(n - 1, -1, -1))
        self.released: list[int] = []

    def take(self) -> int:
        """A free slot."""
        return self.free.pop()

    def give_back(self, slot: int) -> None:
        """No plan in flight refers to the slot."""
        self.released.append(slot)
        self.free.append(slot)
