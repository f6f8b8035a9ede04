"""Which drafts are worth their rows, and that none changes what requests get."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.drafting.draft import Draft
from services.worker.drafting.drafts import Drafts
from services.worker.engine.output import Finish
from services.worker.engine.state import EngineCounters
from services.worker.protocol.plan import StepPlan
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.fairness import PREFILL_COST
from services.worker.scheduling.prefill_budget import PrefillBudget
from services.worker.scheduling.request import Request
from services.worker.scheduling.speculation import DraftCost, Speculator
from tests.unit.worker.scheduling.fake_ranks import VOCAB, generate
from tests.unit.worker.scheduling.harness import Guesses, Harness, cache_of

SURE, UNSURE = 64, 2  # matches of drafts that stand with a probability of 0.9 and 0.3, as long as nothing is learnt


class Fixed:
    """A drafter that has the same tokens after every text."""

    name = "fixed"

    def __init__(self, tokens: Sequence[int], match: int) -> None:
        self.tokens, self.match, self.n_calls = tokens, match, 0

    def draft(self, token_ids: Sequence[int], most: int) -> Draft | None:
        self.n_calls += 1
        return Draft(self.name, self.tokens[:most], self.match) if self.tokens else None


def speculator(cost: DraftCost) -> Speculator:
    chooses = Speculator(SchedulerConfig(64, 16, 256, speculation=True), EngineCounters())
    chooses.cost = cost
    return chooses


def asking(n_drafted: int, match: int = SURE, *, in_flight: bool = False) -> Request:
    """A running request for which a drafter has `n_drafted` tokens."""
    request = Request([1, 2, 3], 3, Sampling())
    request.limit, request.drafts = 1000, Drafts([Fixed([5] * n_drafted, match)])
    request.n_planned = len(request.token_ids) - 1 + in_flight
    return request


def draws(request: Request, token: int) -> None:
    """A step yields `token`, and the next one is in flight."""
    request.token_ids.append(token)
    request.n_planned += 1


def n_searches(requests: Sequence[Request]) -> int:
    drafts = [request.drafts for request in requests if request.drafts is not None]
    return sum(drafter.n_calls for each in drafts for drafter in each.drafters if isinstance(drafter, Fixed))


@pytest.mark.parametrize(("n", "step_ms", "pays"), [(1, 5.8, True), (4, 9.1, True), (16, 24.0, False)])
def test_drafts_end_where_rows_cost_as_much_as_tokens(n: int, step_ms: float, *, pays: bool) -> None:
    """Times of SmolLM2 on two cores: a step of so many, and 1.2 ms a row more."""
    chooses = speculator(DraftCost(step_ms / 1e3, 0.0012))
    assert bool(chooses.choose([asking(8), *(asking(0) for _ in range(n - 1))])) is pays


def test_drafts_are_shared_among_requests() -> None:
    """The second token of a draft is less likely to stand than the first one of another."""
    requests = [asking(20), asking(20)]
    chosen = speculator(DraftCost(1.0, 0.05)).choose(requests)
    lengths = [len(chosen[request].token_ids) for request in requests]
    assert min(lengths) > 1
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    ("n_drafted", "match", "now", "later"),
    [(8, SURE, True, True), (1, SURE, True, False), (8, UNSURE, True, False)],
    ids=["sure", "a token, which is being drawn", "unsure"],
)
def test_result_is_waited_for_only_where_its_draft_is_likely_to_continue(
    n_drafted: int, match: int, now: bool, later: bool
) -> None:
    chooses = speculator(DraftCost(1.0, 0.1, 0.1))
    assert bool(chooses.choose([asking(n_drafted, match)])) is now
    assert bool(chooses.choose([asking(n_drafted, match, in_flight=True)])) is later


def test_drafts_that_no_step_carries_teach_all_the_same() -> None:
    chooses, request = speculator(DraftCost(1.0, 0.1, 0.1)), asking(8, UNSURE, in_flight=True)
    for right, token in ((True, 5), (False, 6)):
        n_steps = 0
        while bool(chooses.choose([request])) is not right:
            draws(request, token)
            n_steps += 1
        assert 0 < n_steps < 40


@pytest.mark.parametrize(("n", "share"), [(1, 1.0), (16, 0.2)])
def test_many_requests_rarely_search_for_drafts_that_do_not_pay(n: int, share: float) -> None:
    chooses, requests = speculator(DraftCost(1.0, 0.5 / n)), [asking(8, UNSURE, in_flight=True) for _ in range(n)]
    for _ in range(50):
        assert not chooses.choose(requests)
        for request in requests:
            draws(request, 6)
    assert n_searches(requests) == pytest.approx(50 * n * share)


def test_tenant_pays_for_rejected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def charged(harness: Harness) -> float:
        costs: list[float] = []
        monkeypatch.setattr(harness.scheduler.ledger, "charge", lambda tenant, cost: costs.append(cost))
        harness.scheduler.speculator.cost = DraftCost(1.0, 0.01)
        request = harness.submit([5, 6, 7], max_tokens=60)
        if request.drafts is not None:
            answer = generate([5, 6, 7], 60, Sampling())
            request.drafts.drafters = [Guesses(answer, request.n_prompt, random.Random(0))]
        harness.drain()
        return sum(costs)

    drafted, plain = Harness(speculation=True), Harness()
    more = charged(drafted) - charged(plain)
    counters = drafted.scheduler.counters
    n_rejected = counters.proposed_tokens.total() - counters.accepted_tokens.total()
    assert more == PREFILL_COST * n_rejected > 0


def test_drafts_give_way_to_prompts() -> None:
    harness = Harness(speculation=True)
    scheduler, plans = harness.scheduler, list[StepPlan]()
    scheduler.speculator.cost = DraftCost(1.0, 0.01)
    scheduler.prefill_budget = PrefillBudget(16)
    first = harness.submit([5, 6, 7], max_tokens=200)
    assert first.drafts is not None
    first.drafts.drafters = [Guesses(generate([5, 6, 7], 200, Sampling()), 3, random.Random(0))]

    def runs(n_steps: int) -> None:
        for _ in range(n_steps):
            while (plan := harness.plan()) is not None:
                plans.append(plan)
            harness.apply()

    runs(5)
    assert any(chunk.proposals for plan in plans for chunk in plan.chunks)
    plans.clear()
    harness.submit([n % VOCAB for n in range(100)], max_tokens=2)
    runs(8)
    prompts = [plan for plan in plans if any(chunk.n_tokens > 1 and not chunk.proposals for chunk in plan.chunks)]
    assert len(prompts) > 4
    assert not any(chunk.proposals for plan in prompts for chunk in plan.chunks)


Answer = tuple[list[int], Finish]


class Ask(NamedTuple):
    """A request, whose prompt is the beginning of one of three texts."""

    text: int
    n_prompt: int
    max_tokens: int
    seed: int
    stops: bool
    embeds: bool


ASKS = st.lists(
    st.builds(
        Ask,
        st.integers(0, 2),
        st.integers(1, 60),
        st.integers(1, 60),
        st.integers(0, 2),
        st.booleans(),
        st.sampled_from([False, False, False, True]),
    ),
    min_size=1,
    max_size=6,
)


def served(asks: Sequence[Ask], n_blocks: int, rng: random.Random | None = None) -> tuple[list[Answer], set[int]]:
    """The requests' answers, and the cached blocks at the end; with `rng` from drafts that often know them."""
    drafts = rng is not None
    harness = Harness(n_blocks=n_blocks, max_running=8, max_batched_tokens=40, kept_events=10**6, speculation=drafts)
    harness.scheduler.speculator.cost = DraftCost(1.0, 0.01)
    requests = []
    for ask in asks:
        prompt = [(7 * i + ask.text) % VOCAB for i in range(ask.n_prompt)]
        sampling = Sampling(seed=ask.seed, stop_token_ids=(5, 6, 7) if ask.stops else ())
        request = harness.submit(prompt, ask.max_tokens, sampling=sampling, embed=ask.embeds)
        if request.drafts is not None and rng is not None:
            answer = generate(prompt, ask.max_tokens, sampling)
            request.drafts.drafters = [Guesses(answer, request.n_prompt, rng)]
        requests.append(request)
    harness.drain()
    harness.events.flush()
    return [(harness.answers[one], harness.ended[one]) for one in requests], cache_of(harness.events)


@given(asks=ASKS, seed=st.integers(0, 1000))
def test_drafts_change_neither_answers_nor_cached_blocks(asks: list[Ask], seed: int) -> None:
    """Requests share beginnings, and end at a token, at their lengths or as embeddings."""
    assert served(asks, 200, random.Random(seed)) == served(asks, 200)


@given(asks=ASKS, seed=st.integers(0, 1000))
def test_drafts_change_no_answer_of_preempted_requests(asks: list[Ask], seed: int) -> None:
    assert served(asks, 10, random.Random(seed))[0] == served(asks, 10)[0]
