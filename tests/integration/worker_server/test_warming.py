"""A worker reports its first steps as a stage of their own, apart from the loading of weights."""

from __future__ import annotations

from ryzanstein.v1 import worker_pb2 as pb

from tests.integration.worker_server.conftest import running_worker
from tests.integration.worker_server.gateway import FakeGateway


async def test_start_and_restart_report_the_stage_warming(redis_url: str) -> None:
    async with running_worker(redis_url, hold_start=True) as worker, FakeGateway(worker.address) as gateway:
        assert not (await gateway.state()).warming
        worker.group.on_warming()
        state = await gateway.wait_state(lambda state: state.warming)
        assert (state.phase, state.detail) == (pb.PHASE_LOADING, "warming up")
        worker.group.may_start.set()
        await gateway.wait_serving()
        worker.group.on_warming()
        assert not (await gateway.state()).warming
        worker.group.may_start.clear()
        worker.group.die()
        lost = await gateway.wait_state(lambda state: "killed by the test" in state.detail)
        worker.group.on_warming()
        state = await gateway.wait_state(lambda state: state.warming)
        assert (state.phase, state.detail) == (pb.PHASE_RECOVERING, lost.detail)
