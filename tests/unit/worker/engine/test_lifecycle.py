"""The phases of a worker: the table alone decides which may follow which."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.base import _REFUSALS
from services.worker.engine.lifecycle import TRANSITIONS, ForbiddenPhaseError, Lifecycle

PHASES = pb.Phase.values()[1:]


@given(st.lists(st.tuples(st.sampled_from(PHASES), st.text(max_size=3))))
def test_phase_changes_only_as_the_table_allows_and_draining_is_final(entered: list[tuple[pb.Phase, str]]) -> None:
    announced: list[int] = []
    life = Lifecycle("loading", lambda: announced.append(1))
    n_entered = 0
    for phase, detail in entered:
        before = life.phase, life.detail
        allowed = before[0] == pb.PHASE_DRAINING or phase == before[0] or phase in TRANSITIONS[before[0]]
        if not allowed:
            with pytest.raises(ForbiddenPhaseError):
                life.enter(phase, detail)
            assert (life.phase, life.detail) == before
            continue
        life.enter(phase, detail)
        n_entered += 1
        assert life.detail == detail
        assert life.phase == (pb.PHASE_DRAINING if before[0] == pb.PHASE_DRAINING else phase)
    assert len(announced) == n_entered


def test_table_has_every_phase_and_each_can_drain_and_serve_again() -> None:
    assert TRANSITIONS.keys() == set(PHASES)
    assert _REFUSALS.keys() == set(PHASES) - {pb.PHASE_SERVING}
    for phase in set(PHASES) - {pb.PHASE_DRAINING}:
        assert pb.PHASE_DRAINING in TRANSITIONS[phase]
        reached = {phase}
        for _ in PHASES:
            reached |= {after for before in reached for after in TRANSITIONS[before]}
        assert pb.PHASE_SERVING in reached
