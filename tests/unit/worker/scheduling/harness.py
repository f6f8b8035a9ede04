"""A scheduler, fake ranks and clients, driven step by step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

from ryzanstein.v1.worker_pb2 import Sampling

from services.common.blockhash import chain_root
from services.worker.drafting.draft import Draft
from services.worker.engine.kv_events import BlockPlace, KvEventLog
from services.worker.engine.output import Finish, Output
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.places import DEVICE_ONLY
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.transfers import Arrival
from tests.unit.worker.scheduling.fake_ranks import FakeRanks, extend
from tests.unit.worker.scheduling.kept_blocks import KeptBlocks


class Guesses:
    """A drafter that often knows the answer."""

    name = "guesses"

    def __init__(self, answer: Sequence[int], n_prompt: int, rng: random.Random) -> None:
        self.answer, self.n_prompt, self.random = answer, n_prompt, rng

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        rest = [*self.answer[len(token_ids) - self.n_prompt :], 5, 6]  # and beyond the end
        guesses = [token if self.random.random() < 0.9 else 3 for token in rest[: self.random.randrange(most + 1)]]
        return Draft(self.name, guesses, 8) if guesses else None


class Harness:
    def __init__(
        self,
        *,
        share_min_tokens: int = 1,
        kept_events: int | None = None,
        kept_blocks: Sequence[int] = (),  # sizes of the places below the pool
        rng: random.Random | None = None,
        clock: Callable[[], float] | None = None,
        **sizes: int,
    ) -> None:
        self.config = SchedulerConfig(**{"n_blocks": 64, "block_tokens": 16, "max_model_len": 256, **sizes})
        self.events = KvEventLog() if kept_events is None else KvEventLog(kept_events)
        self.now = 0.0
        self.kept = KeptBlocks(kept_blocks, self.events, rng or random.Random(0)) if kept_blocks else None
        self.scheduler = Scheduler(
            self.config, self.events, clock=clock or self.read_clock, places=self.kept or DEVICE_ONLY
        )
        if self.kept:
            self.kept.harness = self
        self.scheduler.share_min_tokens = share_min_tokens
        shape = (self.config.n_blocks, self.config.block_tokens, self.config.max_running)
        self.ranks = FakeRanks(*shape, has_state=self.config.has_state)
        self.in_flight: deque[StepResult] = deque()  # results of executed plans, in their order
        self.answers: dict[Request, list[int]] = {}
        self.ended: dict[Request, Finish] = {}

    def read_clock(self) -> float:
        return self.now

    def submit(self, prompt: list[int], max_tokens: int = 4, **fields: object) -> Request:
        root = fields.pop("chain_root", chain_root("test"))
        sampling = fields.pop("sampling", Sampling())
        deferred = bool(fields.pop("deferred", False))
        assert isinstance(sampling, Sampling)
        assert isinstance(root, bytes)
        request = Request(
            token_ids=list(prompt),
            n_prompt=len(prompt),
            sampling=sampling,
            max_tokens=max_tokens,
            chain_root=root,
            **fields,  # type: ignore[arg-type]
        )
        self.scheduler.submit(request, deferred=deferred)
        self.answers[request] = []
        return request

    def write(self, arrival: Arrival, request: Request, n: int) -> None:
        """The ranks take in the next `n` blocks of an arrival, as another worker has computed them."""
        size, state = self.config.block_tokens, 0
        states = [state := extend(state, token) for token in request.token_ids]
        for i, block in enumerate(arrival.fresh[:n], start=len(arrival.held)):
            self.ranks.kv[block][:] = states[i * size : (i + 1) * size]

    def plan(self) -> StepPlan | None:
        self.now += 0.01
        plan = self.scheduler.plan()
        if plan is not None:
            assert plan.n_tokens <= self.config.max_batched_tokens
            self.in_flight.append(self.ranks.execute(plan))
        return plan

    def apply(self) -> list[tuple[Request, Output]]:
        outputs = self.scheduler.apply(self.in_flight.popleft())
        for request, output in outputs:
            assert request not in self.ended, "output after the end"
            answer = self.answers[request]
            assert output.first_index == len(answer)
            assert (output.prefill is not None) == (not answer)
            answer += output.token_ids
            if output.finish is not None:
                self.ended[request] = output.finish
        return outputs

    def step(self) -> bool:
        """Keep two plans in flight, then take a result; False when there is nothing to do."""
        while self.plan() is not None:
            pass
        if not self.in_flight:
            return False
        self.apply()
        return True

    def drain(self, limit: int = 100_000) -> int:
        """Step until idle; returns the number of steps."""
        for n in range(limit):
            if not self.step():
                if self.kept is not None and self.kept.loads:
                    self.kept.work()
                    continue
                assert self.scheduler.idle, "nothing runs although something waits"
                self.scheduler.check()
                return n
        raise AssertionError(f"not idle after {limit} steps")


def cache_of(events: KvEventLog, place: BlockPlace = BlockPlace.DEVICE) -> set[int]:
    """The blocks of a place that a coordinator sees after replaying all events."""
    held: set[int] = set()
    replay = events.since(0)
    assert replay is not None
    for event in replay:
        if event.place is not place:
            continue
        if event.cleared:
            held.clear()
        for value in event.stored:
            assert value not in held
            held.add(value)
        for value in event.removed:
            held.remove(value)
    return held
