"""Builds the plan of one step, and keeps the slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from services.worker.protocol.plan import Admission, Chunk, Frame, Save, StepPlan, TowerWork
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.request import Request
from services.worker.scheduling.snapshots import Reserved, Snapshots

Work = list[tuple[Request, Chunk]]


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Size of a step's work on the ranks."""

    n_rows: int
    n_prefill_rows: int = 0
    n_keys: float = 0.0  # keys that the prefill rows attend to, summed over the rows
    n_proposals: int = 0
    n_encoded: int = 0  # rows among the prefill rows that stand for the cost of the tower

    @classmethod
    def of(cls, chunks: Sequence[Chunk], n_encoded: int = 0) -> StepLoad:
        """The load of a plan's chunks, and of a tower's work that costs as much as `n_encoded` rows of prompts."""
        several = [chunk for chunk in chunks if chunk.n_tokens > 1]
        prefills = [chunk for chunk in several if not chunk.proposals]
        n_keys = sum([chunk.n_tokens * (chunk.start + chunk.n_tokens / 2) for chunk in prefills])
        n_proposals = sum([len(chunk.proposals) for chunk in several])
        n_rows = len(chunks) + sum([chunk.n_tokens - 1 for chunk in several]) + n_encoded
        n_prefill_rows = sum([chunk.n_tokens for chunk in prefills]) + n_encoded
        return cls(n_rows, n_prefill_rows, n_keys, n_proposals, n_encoded)


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A planned step whose result is outstanding."""

    step: int
    work: Work
    encoding: Sequence[Request]  # those with work of the tower alone
    load: StepLoad
    planned_at: float
    saves: Sequence[Reserved] = ()
    waited: bool = False  # its plan waited for the result before, for proposals, perhaps in vain

    @property
    def proposes(self) -> bool:
        """Whether a chunk has proposals: what follows is known with the result only."""
        return self.load.n_proposals > 0


def prompt_tokens(steps: Iterable[PlannedStep]) -> int:
    """Number of tokens of prompts that the steps compute."""
    return sum(step.load.n_prefill_rows - step.load.n_encoded for step in steps)


@dataclass(slots=True)
class StepBuilder:
    """Contents of a plan so far, and the rows and the budget left."""

    config: SchedulerConfig
    snapshots: Snapshots | None = None  # None: no states are saved
    saves: list[Reserved] = field(default_factory=list)
    room: int = field(init=False)  # rows left
    prefill_budget: PrefillBudget = field(init=False)
    budget: float = field(init=False)  # rest of `prefill_budget`
    work: Work = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    tower: list[TowerWork] = field(default_factory=list)
    encoding: list[Request] = field(default_factory=list)  # those without rows, whose frames are encoded
    under_way: Request | None = None  # has the one frame that is between two layers of the tower
    pressed: bool = False  # a running request found no free block, so nothing is admitted

    def __post_init__(self) -> None:
        self.room = self.config.max_batched_tokens
        self.set_prefill_budget(PrefillBudget(self.room))

    def set_prefill_budget(self, allowed: PrefillBudget) -> None:
        """Limit the prompts of the step to `allowed` and to the rows left."""
        self.prefill_budget, self.budget = allowed, min(self.room, allowed.n_rows)

    @property
    def empty(self) -> bool:
        """Whether there is nothing for the ranks to do."""
        return not (self.work or self.tower or self.admissions)

    @property
    def open(self) -> bool:
        """Whether rows and budget are left for prompts."""
        return self.budget > 0 and self.room > 0

    def hold(self, request: Request | None) -> tuple[float, int]:
        """Hold back, until `resume`, budget and room for a request.

        Half of the budget, or the cost of the rest of the request's prompt if that is less, and the rows of a frame.
        """
        if request is None:
            return 0.0, 0
        rest = self.prefill_budget.cost(request.n_planned, len(request.token_ids) - request.n_planned)
        rest += self.config.row_cost * sum(frame.n_tokens for frame in request.frames[request.n_encoded :])
        held = min(rest, (self.budget + 1) // 2), self.config.frame_tokens if request.frames else 0
        self.budget, self.room = self.budget - held[0], self.room - held[1]
        return held

    def resume(self, held: tuple[float, int]) -> None:
        """Give back what was held."""
        self.budget, self.room = self.budget + held[0], self.room + held[1]

    def rows_for(self, start: int, wanted: int) -> int:
        """Number of rows of a prompt from position `start` on, at most `wanted`, that room and budget allow."""
        return min(wanted, self.room, self.prefill_budget.rows(start, self.budget))

    def fits(self, request: Request) -> bool:
        """Whether there is room for the first rows of a request: a whole frame, or all without a cache."""
        least = self.config.frame_tokens if request.frames else 0
        n_known = len(request.token_ids)
        return self.room >= least and (self.config.caches or self.rows_for(0, n_known) == n_known)

    def encode(self, request: Request, wanted: int) -> int:
        """Plan the tower's work for a request's next rows; returns their number, at most `wanted`.

        Rows end before a frame that is not encoded to the end. The frame of the first row gets a layer at least, unless
        another request's frame is under way. Frames whose rows are planned together are not cut; the number is 0
        without room for the first one.
        """
        n_rows, tower = self._encoded_rows(request, wanted)
        for work in tower:
            ends = work.stop == self.config.frame_layers
            request.n_encoded, request.n_layers = request.n_encoded + ends, 0 if ends else work.stop
            self.budget -= self._tower_cost(work.frame, work.n_layers)
            if request.n_layers or self.under_way is request:
                self.under_way = request if request.n_layers else None
        self.tower += tower
        n_rows = self._uncut(request, n_rows)
        if tower and not n_rows:
            self.encoding.append(request)
            request.n_in_flight += 1
        return n_rows

    def _uncut(self, request: Request, n_rows: int) -> int:
        end, whole = request.n_planned + n_rows, self.config.frame_tokens > 0 and n_rows > 0
        frame = next((one for one in request.frames if one.first < end < one.end), None) if whole else None
        if frame is None:
            return n_rows
        if frame.first > request.n_planned:
            return frame.first - request.n_planned
        rest = frame.end - request.n_planned
        return rest if rest <= self.room else 0

    def _encoded_rows(self, request: Request, wanted: int) -> tuple[int, list[TowerWork]]:
        """Number of rows before the first frame that is not encoded to the end, and the layers that are paid for."""
        start, budget, tower = request.n_planned, self.budget, list[TowerWork]()
        n_rows, layer = self.rows_for(start, wanted), request.n_layers
        for frame in request.frames[request.n_encoded :]:
            before = max(0, frame.first - start)
            if before >= n_rows:
                break
            paid = budget - self.prefill_budget.cost(start, before)
            stop = layer + self._layers_for(frame, paid, awaited=before == 0 and not tower)
            if stop < self.config.frame_layers and self.under_way not in (None, request):
                return before, tower
            stop = min(stop, self.config.frame_layers)
            if stop > layer:
                tower.append(TowerWork(request.slot, frame, layer, stop))
            if stop < self.config.frame_layers:
                return before, tower
            budget -= self._tower_cost(frame, stop - layer)
            n_rows = min(n_rows, max(before, self.prefill_budget.rows(start, budget) if budget > 0 else 0))
            layer = 0
        return n_rows, tower

    def _layers_for(self, frame: Frame, budget: float, *, awaited: bool) -> int:
        """Number of layers of a frame's tower that `budget` pays for; at least one if a row waits for it."""
        cost = frame.n_tokens * self.config.row_cost
        return max(int(awaited), int(budget * self.config.frame_layers // cost))

    def _tower_cost(self, frame: Frame, n_layers: int) -> float:
        return n_layers * frame.n_tokens * self.config.row_cost / self.config.frame_layers

    def add(
        self,
        request: Request,
        n_rows: int,
        new_blocks: tuple[int, ...],
        *,
        draws: bool = True,
        proposals: tuple[int, ...] = (),
    ) -> None:
        """Plan the request's next `n_rows` positions, of which the last draws; with `proposals`, all of them do."""
        start = request.n_planned
        request.n_planned += n_rows
        request.n_in_flight += 1
        self.room -= n_rows
        if self.snapshots is not None:
            self.saves += self.snapshots.reserve(request, start, start + n_rows)
        self.work.append((request, Chunk(request.slot, start, n_rows, draws, new_blocks, proposals)))

    def add_prompt(self, request: Request, n_rows: int, new_blocks: tuple[int, ...], *, ends: bool) -> None:
        """Plan the next `n_rows` positions of a prompt, and pay for them; `ends`: they are its last."""
        self.budget -= self.prefill_budget.cost(request.n_planned, n_rows)
        self.add(request, n_rows, new_blocks, draws=ends)
        request.prefills = not ends

    def planned(self, plan: StepPlan, now: float, *, waited: bool) -> PlannedStep:
        """The scheduler's record of the step until its result comes."""
        load = StepLoad.of(
            plan.chunks, math.ceil(sum(self._tower_cost(work.frame, work.n_layers) for work in plan.tower))
        )
        return PlannedStep(plan.step, self.work, self.encoding, load, now, self.saves, waited or load.n_proposals > 0)

    def finish(self, step: int, released: list[int]) -> StepPlan:
        """The plan for the ranks."""
        chunks = tuple([chunk for _, chunk in self.work])
        saves = tuple([Save(save.request.slot, save.position, save.row) for save in self.saves])
        return StepPlan(step, tuple(released), tuple(self.admissions), chunks, saves, tuple(self.tower))


class Slots:
    """The free slots, and the slots that the next plan announces as released."""

    def __init__(self, n: int) -> None:
        self.free = list(range(n - 1, -1, -1))
        self.released: list[int] = []

    def take(self) -> int:
        """Take a free slot."""
        return self.free.pop()

    def give_back(self, slot: int) -> None:
        """Free a slot to which no plan in flight refers."""
        self.released.append(slot)
        self.free.append(slot)
