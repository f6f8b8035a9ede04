"""Promises of each part of a policy, and of compositions as operators write them."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import services.router.policies as policies
from services.common.lifecycle import StartupError, read_settings
from services.router.policies import make_policy
from services.router.policies.base import Filter, Picker, PolicyPart, Scorer
from services.router.policies.registry import PARTS, Composition, PolicyName
from services.router.settings import RouterSettings
from services.router.snapshot import Decision, Floats, Query, Snapshot, hash64, why_not_for
from tests.unit.router.fleets import LabWorker, situations, snapshot_of

FOLDER = Path(policies.__file__).parent


def decide(snapshot: Snapshot, query: Query, **parts: Any) -> Decision:
    choice = make_policy(Composition.model_validate(parts)).choose(snapshot, query, why_not_for(snapshot, query))
    assert choice is not None
    return choice


def costs_of(snapshot: Snapshot, query: Query, *scorers: dict[str, Any]) -> Floats:
    return make_policy(Composition.model_validate({"scorers": scorers})).weigh(snapshot, query)[1]


def left_by(snapshot: Snapshot, query: Query, *filters: dict[str, Any], **parts: Any) -> set[int]:
    """Workers that may have the request after these filters: the picker gives each a turn."""
    turns = range(len(snapshot.worker_ids))
    actual = (
        decide(snapshot, replace(query, turn=i), filters=filters, picker={"type": "turn"}, **parts) for i in turns
    )
    return {choice.index for choice in actual}


def test_affordable_keeps_workers_that_cost_little_more_than_the_cheapest() -> None:
    snapshot = snapshot_of([LabWorker(queued=queued) for queued in (1000, 1300, 4000, 0)])
    snapshot = replace(snapshot, why_not=np.array([0, 0, 0, 1], dtype=np.uint8))
    parts = {"scorers": [{"type": "queue"}]}  # 100, 130 and 400 ms
    assert left_by(snapshot, Query(1), {"type": "affordable", "factor": 1.25, "ms": 4}, **parts) == {0}
    assert left_by(snapshot, Query(1), {"type": "affordable", "factor": 1.25, "ms": 6}, **parts) == {0, 1}
    assert left_by(snapshot, Query(1), {"type": "affordable", "factor": 4, "ms": 0}, **parts) == {0, 1, 2}


def test_spare_and_least_keep_less_loaded_workers_and_a_filter_that_leaves_no_worker_is_skipped() -> None:
    snapshot = snapshot_of(
        [
            LabWorker(load=3, queued=9, share=0.5, load_share=0.9),
            LabWorker(load=3, queued=5, share=0.6, load_share=0.8),
            LabWorker(load=8, queued=1, share=1.9, load_share=1.3),
        ]
    )
    query, spare = Query(1), {"type": "spare"}
    assert left_by(snapshot, query, spare) == {0, 1}
    assert left_by(snapshot, query, {"type": "least", "of": "requests"}) == {0, 1}
    assert left_by(snapshot, query, {"type": "least", "of": "queued_tokens"}) == {2}
    assert left_by(snapshot, query, {"type": "least", "of": "queued_tokens"}, spare) == {2}, "no worker would be left"
    assert left_by(snapshot, query, spare, {"type": "least", "of": "queued_tokens"}) == {1}
    assert left_by(snapshot, query, {"type": "least", "of": "work"}) == {0}
    assert left_by(snapshot, query, {"type": "least", "of": "work", "within": 0.1}) == {0, 1}
    idle = replace(snapshot, busy=False)
    assert left_by(idle, query, spare, {"type": "least", "of": "work"}) == {0, 1, 2}


BOUNDED: dict[str, Any] = {"filters": [{"type": "bounded", "factor": 1.25}], "picker": {"type": "rendezvous"}}


def test_hashing_with_bounded_loads_keeps_every_worker_below_the_bound() -> None:
    """Three of four requests are one session's: hashed alone, they all are at one worker."""
    hot, loads = Query(100, session_key=hash64("hot")), [0] * 5
    for i in range(200):
        snapshot = snapshot_of([LabWorker(load=load) for load in loads])
        snapshot = replace(snapshot, why_not=np.array([0, 0, 0, 0, 1], dtype=np.uint8))
        query = hot if i % 4 else Query(100, session_key=hash64(f"session {i}"))
        loads[decide(snapshot, query, **BOUNDED).index] += 1
        assert max(loads) <= np.ceil(1.25 * (i + 1) / 4), "of the four that are eligible"
    assert loads[4] == 0


@given(situations(), st.integers(0, 2**64 - 1))
def test_a_session_leaves_its_hash_only_while_that_worker_is_full_and_routers_agree_where_to(
    situation: tuple[Snapshot, Query], other_key: int
) -> None:
    snapshot, query = situation
    query = replace(query, session_key=query.session_key or 1, excluded=())
    eligible = why_not_for(snapshot, query) == 0
    assume(eligible.any())
    load = snapshot.load
    full = load + 1 > np.ceil(1.25 * (load[eligible].sum() + 1) / eligible.sum())
    home = decide(snapshot, query, picker={"type": "rendezvous"}).index
    there = replace(query, request_key=other_key, turn=query.turn + 1)
    choice = decide(snapshot, query, **BOUNDED)
    assert (choice.index == home) == (not full[home])
    assert not full[choice.index]
    assert choice.index == decide(snapshot, there, **BOUNDED).index


def test_filters_can_be_for_sessions_and_for_busy_fleets_only() -> None:
    snapshot = snapshot_of([LabWorker(load=1), LabWorker(load=2)])
    for only, query, fleet, left in (
        ("sessions_only", Query(1), snapshot, {0, 1}),
        ("sessions_only", Query(1, session_key=5), snapshot, {0}),
        ("busy_only", Query(1), snapshot, {0}),
        ("busy_only", Query(1), replace(snapshot, busy=False), {0, 1}),
    ):
        assert left_by(fleet, query, {"type": "least", "of": "requests", only: True}) == left


def test_a_composition_keeps_sessions_and_says_so() -> None:
    snapshot, query = snapshot_of([LabWorker(queued=2000), LabWorker()]), Query(10, session_key=5, bound=0)
    keep = {"type": "keep_session", "factor": 1, "ms": 300}
    decision = decide(snapshot, query, filters=[keep])
    assert (decision.index, decision.reason) == (0, "session kept")
    moved = decide(snapshot, query, filters=[{**keep, "ms": 100}])
    assert (moved.index, moved.reason) == (1, "session rebound")
    new = decide(snapshot, replace(query, bound=-1), filters=[keep])
    assert (new.index, new.reason) == (1, "session bound")
    assert decide(snapshot, replace(query, session_key=0), filters=[keep]).reason == "lowest cost"


@pytest.mark.parametrize(
    ("scorer", "dearest"),
    [
        ({"type": "time_to_first_token"}, 0),
        ({"type": "decode_time"}, 1),
        ({"type": "queue"}, 0),
        ({"type": "load"}, 1),
        ({"type": "prefix"}, 2),
        ({"type": "session"}, None),
        ({"type": "work"}, 3),
    ],
)
def test_scorers_score_the_quantity_of_their_name(scorer: dict[str, Any], dearest: int | None) -> None:
    """Every worker is the worst at one thing; the session's is the only one that is good for it."""
    matched = np.array([500.0, 500.0, 0.0, 500.0])
    snapshot = snapshot_of([LabWorker(queued=9000), LabWorker(load=60), LabWorker(), LabWorker(share=1.5)])
    query = Query(1000, 100, session_key=5, bound=3, matched_tokens=matched)
    costs, single = (costs_of(snapshot, query, {**scorer, "weight": weight}) for weight in (2, 1))
    assert costs == pytest.approx(2 * single)
    if dearest is None:
        assert single.tolist() == [1, 1, 1, 0]
    else:
        assert single.argmax() == dearest
        assert np.count_nonzero(single == single.max()) == 1


def test_scores_are_weighted_and_added_up() -> None:
    snapshot = snapshot_of([LabWorker(queued=100, load=5), LabWorker(load=7)])
    costs = costs_of(snapshot, Query(1), {"type": "queue"}, {"type": "load", "weight": 10})
    assert costs.tolist() == [60, 70]


def test_softmax_has_odds_by_cost() -> None:
    snapshot = snapshot_of([LabWorker(queued=100), LabWorker(), LabWorker(why_not=1)])  # 10 ms apart
    parts = {"scorers": [{"type": "queue"}], "picker": {"type": "softmax", "temperature_ms": 10 / np.log(3)}}
    taken = Counter(decide(snapshot, Query(1, request_key=hash64(f"r{i}")), **parts).index for i in range(4000))
    assert set(taken) == {0, 1}
    assert taken[1] / taken[0] == pytest.approx(3, rel=0.15)


_NEEDED: dict[str, dict[str, Any]] = {"least": {"of": "work"}, "softmax": {"temperature_ms": 5}}


def _any(kind: type[PolicyPart], **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    names = [name for name, part in PARTS.items() if issubclass(part, kind)]
    return st.sampled_from(names).map(lambda name: {"type": name, **fields, **_NEEDED.get(name, {})})


parts_of = {
    "filters": st.lists(_any(Filter), max_size=4),
    "scorers": st.lists(_any(Scorer, weight=3), min_size=1, max_size=4),
    "picker": _any(Picker),
}


@given(st.fixed_dictionaries(parts_of), situations())
def test_every_composition_chooses_an_eligible_worker_if_any_is_eligible(
    parts: dict[str, Any], situation: tuple[Snapshot, Query]
) -> None:
    snapshot, query = situation
    why_not = why_not_for(snapshot, query)
    choice = make_policy(Composition.model_validate(parts)).choose(snapshot, query, why_not)
    assert (choice is None) == bool(why_not.all())
    assert choice is None or not why_not[choice.index]


def test_quantities_outside_a_policy_are_not_looked_up() -> None:
    wanted = {name: make_policy(name) for name in get_args(PolicyName)}
    assert {name for name, policy in wanted.items() if policy.uses_prefixes} == {"cost"}
    assert {name for name, policy in wanted.items() if policy.uses_sessions} == {"cost"}
    by_queue = make_policy(Composition.model_validate({"scorers": [{"type": "queue"}]}))
    assert (by_queue.uses_prefixes, by_queue.uses_sessions) == (False, False)


def configured(policy: str, monkeypatch: pytest.MonkeyPatch) -> RouterSettings:
    monkeypatch.setenv("RYZANSTEIN_POLICY", policy)
    return read_settings(RouterSettings)


def test_a_composition_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"name": "mine", "scorers": [{"type": "load", "weight": 7}], "picker": {"type": "lowest_cost"}})
    policy = make_policy(configured(text, monkeypatch).policy)
    snapshot = snapshot_of([LabWorker(load=2), LabWorker(load=1)])
    choice = policy.choose(snapshot, Query(1), snapshot.why_not)
    assert choice is not None
    assert (policy.name, choice.index, choice.chosen.cost_ms) == ("mine", 1, 7)
    assert configured("weighted", monkeypatch).policy == "weighted"


@pytest.mark.parametrize(
    ("policy", "complaint"),
    [
        (
            "fastest",
            "it should be cost, round_robin, weighted, least_loaded, session_hash, or a map with name",
        ),
        ('{"picker":', "it should be JSON, but"),
        ('{"filter": []}', "filter: is not known; allowed are name, filters, scorers, picker"),
        ('{"scorers": []}', "scorers: .*at least 1"),
        ('{"scorers": [{"weight": 1}]}', "scorers.0: needs a type, one of adapter_load, decode_time, load"),
        ('{"picker": {"type": "x"}}', "picker.type: 'x' is not one of 'lowest_cost', 'rendezvous'"),
        ('{"picker": {"type": "turn", "ms": 1}}', "picker.ms: is not known; allowed are type"),
        ('{"filters": [{"type": "least"}]}', "filters.0.of: Field required"),
        ('{"filters": [{"type": "least", "of": "age"}]}', "filters.0.of: it should be 'requests', 'queued_tokens' or"),
        ('{"filters": [{"type": "affordable", "factor": 0.5}]}', "filters.0.factor: it should be greater than or"),
    ],
)
def test_a_wrong_policy_is_rejected_with_its_field_and_the_allowed_values(
    policy: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match=f"RYZANSTEIN_POLICY is .*{complaint}"):
        configured(policy, monkeypatch)


def test_every_part_is_found() -> None:
    written = {
        name
        for kind in ("filters", "scorers", "pickers")
        for file in (FOLDER / kind).glob("[a-z]*.py")
        for name in re.findall(r'^    type: Literal\["(\w+)"\]', file.read_text(), re.MULTILINE)
    }
    assert written == set(PARTS)
