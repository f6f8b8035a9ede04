from __future__ import annotations

from dataclasses import replace

from services.router.policies import make_policy
from services.router.snapshot import why_not_for
from tests.unit.router.trace import NAMES, PER_DIGEST, QUERIES, SNAPSHOTS, digests, recorded, situations


def test_decisions_equal_the_recorded_decisions() -> None:
    """Every policy over idle, busy and mixed fleets, with every reason it can give: a change of speed changes none."""
    now, then = digests(), recorded()
    assert len(now) == len(then) == SNAPSHOTS * QUERIES // PER_DIGEST
    differing = {
        name: [number * PER_DIGEST for number, (a, b) in enumerate(zip(now, then, strict=True)) if a[name] != b[name]]
        for name in NAMES
    }
    assert not any(differing.values()), f"decisions that differ, by the first of their {PER_DIGEST}: {differing}"


def test_session_that_is_kept_without_a_look_at_all_workers_is_kept_by_the_whole_choice() -> None:
    policy, n_kept, n_sticky = make_policy("cost"), 0, 0
    for snapshot, drawn in situations():
        if drawn.bound < 0 or not drawn.session_key:
            continue
        query, cached = replace(drawn, bindings_known=True, excluded=()), None
        if query.matched_tokens is not None:
            cached = query.matched_tokens[query.bound] = float(query.matched_tokens.max())
        choice = policy.choose(snapshot, query, why_not_for(snapshot, query))
        decision = policy.keep(snapshot, query, cached)
        n_sticky += choice is not None and choice.reason == "session kept"
        if decision is None:
            continue
        n_kept += 1
        assert choice is not None
        assert (choice.index, choice.reason) == (decision.index, decision.reason)
        assert (*choice.chosen[:4], choice.chosen.pulled_tokens) == (*decision.chosen[:4], 0.0)
    assert n_kept > n_sticky / 3 > 300, (n_kept, n_sticky)
