from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.router.policies import make_policy
from services.router.snapshot import IneligibleReason, Query, Snapshot, hash64, why_not_for
from tests.unit.router.fleets import LabWorker, situations, snapshot_of

NAMES = ("cost", "round_robin", "weighted", "least_loaded", "session_hash")
policy_names = st.sampled_from(NAMES)


def choose(name: str, snapshot: Snapshot, query: Query) -> int | None:
    choice = make_policy(name).choose(snapshot, query, why_not_for(snapshot, query))  # type: ignore[arg-type]
    return None if choice is None else choice.index


@given(policy_names, situations())
def test_an_excluded_worker_is_chosen_only_when_no_other_worker_is_left(
    name: str, situation: tuple[Snapshot, Query]
) -> None:
    snapshot, query = situation
    index = choose(name, snapshot, query)
    if index in query.excluded:
        others = [i for i in range(len(snapshot.worker_ids)) if i not in query.excluded and not snapshot.why_not[i]]
        needed = query.prompt_tokens + max(query.max_tokens, 1)
        assert all(0 < snapshot.speeds.max_request_tokens[i] < needed for i in others)


@given(policy_names, situations())
def test_a_too_small_worker_is_chosen_only_when_every_worker_is_too_small(
    name: str, situation: tuple[Snapshot, Query]
) -> None:
    snapshot, query = situation
    index = choose(name, snapshot, query)
    needed = query.prompt_tokens + max(query.max_tokens, 1)
    if index is not None and 0 < snapshot.speeds.max_request_tokens[index] < needed:
        limits = snapshot.speeds.max_request_tokens[snapshot.why_not == 0]
        assert ((limits > 0) & (limits < needed)).all()


def test_session_is_kept_without_a_look_at_all_workers_while_its_own_is_near_an_idle_one() -> None:
    query = Query(2000, 128, session_key=1, bound=1)
    near, far = (
        [LabWorker(load=1), LabWorker(load=3, queued=queued), LabWorker(why_not=3)] for queued in (500, 50_000)
    )
    policy = make_policy("cost")
    assert policy.keep(snapshot_of(near), query, 1600.0) is not None
    assert policy.keep(snapshot_of(far), query, 1600.0) is None, "an idle worker may be better"
    assert policy.keep(snapshot_of(near), replace(query, bound=2), 1600.0) is None, "its worker is not eligible"
    shared = [LabWorker(load=1), LabWorker(load=3, share=2.0, load_share=2.0, excess=1e6)]
    assert policy.keep(snapshot_of(shared), query, 1600.0) is None, "it has had more than its share"
    assert make_policy("least_loaded").keep(snapshot_of(near), query, 1600.0) is None


def eligible_costs(snapshot: Snapshot, query: Query) -> np.ndarray:  # type: ignore[type-arg]
    return np.where(why_not_for(snapshot, query) == 0, make_policy("cost").weigh(snapshot, query)[1], np.inf)


@given(situations())
def test_a_session_stays_while_its_worker_is_bearable_and_has_no_more_than_its_share(
    situation: tuple[Snapshot, Query],
) -> None:
    snapshot, query = situation
    query = replace(query, session_key=query.session_key or 1, bindings_known=True)
    assume(query.bound >= 0)
    costs = eligible_costs(snapshot, query)
    assume(np.isfinite(costs).any())
    choice = make_policy("cost").choose(snapshot, query, why_not_for(snapshot, query))
    assert choice is not None
    share, excess = snapshot.share[query.bound], snapshot.excess[query.bound]
    cached = 0.0 if query.matched_tokens is None else query.matched_tokens[query.bound]
    own = query.prompt_tokens - cached + 0.5 * min(query.max_tokens or 256, 256)
    presumed_ms = 0.0
    if query.matched_tokens is None:
        presumed_ms = query.prompt_tokens / snapshot.speeds.prefill_rate[query.bound] * 1000
    if costs[query.bound] - presumed_ms > 2 * costs.min() + 100:
        assert choice.reason == "session rebound"
        assert choice.index != query.bound
    elif share <= 1.05 or excess <= 4 * own or snapshot.load_share[query.bound] <= 1.0:
        assert (choice.index, choice.reason) == (query.bound, "session kept")
    else:
        assert choice.reason == ("session kept" if choice.index == query.bound else "session evened out")


@given(situations())
def test_a_new_or_moved_session_goes_to_the_least_loaded_worker_near_the_cheapest(
    situation: tuple[Snapshot, Query],
) -> None:
    snapshot, query = situation
    query = replace(query, session_key=query.session_key or 1, bindings_known=True)
    costs = eligible_costs(snapshot, query)
    assume(np.isfinite(costs).any())
    choice = make_policy("cost").choose(snapshot, query, why_not_for(snapshot, query))
    assert choice is not None
    if choice.index != query.bound:
        near = costs <= 1.25 * costs.min() + 50
        spare = near & (snapshot.load_share < 1.0)
        near = spare if spare.any() else near
        idlest = near & (snapshot.share <= snapshot.share[near].min() + 0.01)
        assert idlest[choice.index]
        assert costs[choice.index] <= costs[idlest].min() * 1.02 + 1


@given(situations())
def test_fair_shares_decide_like_ignored_shares(situation: tuple[Snapshot, Query]) -> None:
    snapshot, query = situation
    n = len(snapshot.worker_ids)
    fair = replace(snapshot, share=np.ones(n), excess=np.zeros(n), load_share=np.ones(n))
    assert choose("cost", fair, query) == choose("cost", replace(fair, busy=False), query)


@given(situations())
def test_without_a_session_the_cost_is_minimal(situation: tuple[Snapshot, Query]) -> None:
    snapshot, query = situation
    query = replace(query, session_key=0)
    costs = eligible_costs(snapshot, query)
    index = choose("cost", snapshot, query)
    assert (index is None) == (not np.isfinite(costs).any())
    if index is not None:
        assert costs[index] <= costs.min() * 1.02 + 1


@pytest.mark.parametrize("name", ["cost", "session_hash"])
@given(situations(), st.integers(0, 2**64 - 1))
def test_routers_without_redis_agree_on_a_session(name: str, situation: tuple[Snapshot, Query], other_key: int) -> None:
    snapshot, query = situation
    here = replace(query, session_key=7, bindings_known=False)
    there = replace(here, request_key=other_key, turn=query.turn + 1, bound=-1)
    assert choose(name, snapshot, here) == choose(name, snapshot, there)


@given(st.integers(2, 12), st.data())
def test_a_lost_worker_moves_only_its_own_hashed_sessions(n: int, data: st.DataObject) -> None:
    gone = data.draw(st.integers(0, n - 1))
    before = snapshot_of([LabWorker()] * n)
    after = snapshot_of([LabWorker(why_not=int(IneligibleReason.DISCONNECTED) if i == gone else 0) for i in range(n)])
    for session in range(50):
        query = Query(100, session_key=hash64(f"session {session}"), bindings_known=False)
        old, new = choose("cost", before, query), choose("cost", after, query)
        assert old in (new, gone)


def test_cached_prefixes_are_worth_their_prefill_time() -> None:
    snapshot = snapshot_of([LabWorker(queued=900), LabWorker()])
    cached = np.array([1000.0, 0.0])
    assert choose("cost", snapshot, Query(2000, 16, matched_tokens=cached)) == 0
    busier = snapshot_of([LabWorker(queued=1500), LabWorker()])
    assert choose("cost", busier, Query(2000, 16, matched_tokens=cached)) == 1


def test_a_session_stays_with_a_slower_worker_when_cache_contents_are_unknown() -> None:
    snapshot = snapshot_of([LabWorker(rate=1000), LabWorker()])
    query = Query(700, 2, session_key=1, bound=0)
    assert choose("cost", snapshot, query) == 0
    assert choose("cost", snapshot, replace(query, matched_tokens=np.zeros(2))) == 1, "it is known that nothing is"
    queue = snapshot_of([LabWorker(rate=1000, queued=1000), LabWorker()])
    assert choose("cost", queue, query) == 1


def test_a_slower_worker_gets_requests_with_an_equal_finish_time() -> None:
    snapshot = snapshot_of([LabWorker(rate=1000), LabWorker(rate=10_000, queued=5000)])
    assert choose("cost", snapshot, Query(100, 16)) == 0
    assert choose("cost", snapshot, Query(5000, 16)) == 1


def test_equal_workers_share_arrivals_between_two_states() -> None:
    snapshot = snapshot_of([LabWorker()] * 4)
    shares = Counter(choose("cost", snapshot, Query(100, 64, request_key=hash64(f"r{i}"))) for i in range(4000))
    assert max(shares.values()) < 1100
    assert len(shares) == 4


def test_of_equal_costs_the_fewest_requests_decide() -> None:
    """One decode more costs 1.5 %, within what counts as equal: by chance, workers would idle next to busy ones."""
    snapshot = snapshot_of([LabWorker(load=1), LabWorker(), LabWorker(load=1), LabWorker()])
    costs = eligible_costs(snapshot, Query(100, 64))
    assert costs.max() <= costs.min() * 1.02 + 1
    chosen = {choose("cost", snapshot, Query(100, 64, request_key=hash64(f"r{i}"))) for i in range(100)}
    assert chosen == {1, 3}
    pair = snapshot_of([LabWorker(load=1), LabWorker()])
    assert {choose("cost", pair, Query(100, 64, request_key=key)) for key in range(8)} == {1}


def test_round_robin_takes_turns() -> None:
    snapshot = snapshot_of([LabWorker(), LabWorker(why_not=int(IneligibleReason.DRAINING)), LabWorker()])
    assert [choose("round_robin", snapshot, Query(1, turn=t)) for t in range(4)] == [0, 2, 0, 2]


def test_weights_are_kept_to_within_a_percent() -> None:
    snapshot = snapshot_of([LabWorker(rate=1000), LabWorker(rate=3000), LabWorker(rate=6000)])
    shares = Counter(choose("weighted", snapshot, Query(1, turn=t)) for t in range(1000))
    assert [round(shares[i] / 10) for i in range(3)] == [10, 30, 60]


def test_least_loaded_counts_requests_then_tokens() -> None:
    snapshot = snapshot_of([LabWorker(load=2), LabWorker(load=1, queued=500), LabWorker(load=1, queued=100)])
    assert choose("least_loaded", snapshot, Query(1)) == 2
