"""The state that a worker sends to routers."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.card import EngineIdentity, SharedHost
from services.worker.api.servicer import _matters
from services.worker.api.state import StateForRouters
from tests.unit.worker.engine.stand_ins import idle_engine


async def test_the_routers_that_were_heard_last_are_acknowledged() -> None:
    state = StateForRouters(EngineIdentity("w", "i", "m", 0), await idle_engine())
    for number in (*range(64), 0, 64):
        state.acknowledge(pb.DispatchTicket(router_id=f"r{number}", seq=number + 1))
    acked = dict(state().acked)
    assert (len(acked), acked["r0"], acked["r64"], "r1" in acked) == (64, 1, 65, False)


async def test_the_shared_host_is_reported() -> None:
    shared = SharedHost("pod-1", max_awake=2, idle_sleep_s=300, pinned=True)
    state = StateForRouters(EngineIdentity("w", "i", "m", 0, shared=shared), await idle_engine())()
    assert (state.host, state.max_awake, state.idle_sleep_s, state.pinned) == ("pod-1", 2, 300, True)


async def test_drafts_are_counted_and_wait_for_a_change_by_a_tenth() -> None:
    engine = await idle_engine()
    state = StateForRouters(EngineIdentity("w", "i", "m", 0), engine)
    engine.counters.proposed_tokens.update(prompt_lookup=90, prediction=10)
    engine.counters.accepted_tokens.update(prompt_lookup=40, prediction=10)
    before = state()
    assert (before.drafted_tokens, before.accepted_tokens) == (100, 50)
    engine.counters.proposed_tokens["suffix"] += 10
    assert not _matters(state(), before)
    engine.counters.proposed_tokens["suffix"] += 1
    assert _matters(state(), before)
