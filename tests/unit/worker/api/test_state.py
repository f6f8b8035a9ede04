"""What a worker tells routers of their own dispatches."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.card import EngineIdentity
from services.worker.api.state import StateForRouters
from tests.unit.worker.engine.fake_engine import FakeEngine


async def test_the_routers_that_were_heard_last_are_acknowledged() -> None:
    state = StateForRouters(EngineIdentity("w", "i", "m", 0), FakeEngine())
    for number in (*range(64), 0, 64):
        state.acknowledge(pb.DispatchTicket(router_id=f"r{number}", seq=number + 1))
    acked = dict(state().acked)
    assert (len(acked), acked["r0"], acked["r64"], "r1" in acked) == (64, 1, 65, False)
