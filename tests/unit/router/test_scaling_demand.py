"""The demand for a pool: its workers' states, and its share of what routers hold and place."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

import pytest
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc, worker_pb2

from services.common.leases import Lease
from services.common.router_addresses import RouterAddresses
from services.common.rpc import bind, new_server
from services.router.breaker import BreakerLimits
from services.router.fleet import Fleet
from services.router.scaling.arrivals import HALF_LIFE_S, Arrivals
from services.router.scaling.demand import FleetView
from services.router.scaling.peers import DemandByModel, ModelDemand, RouterPeers
from services.router.scaling.pools import ScaledPool, Scaling, ScalingMode

HELD = DemandByModel({"tiny": ModelDemand(4, 400, 90.0, 0.0), "huge": ModelDemand(2, 20, 0.0, 7.0)}, complete=True)


def pool(name: str, *models: str, most: int = 2) -> ScaledPool:
    return ScaledPool(
        name=name,
        mode=ScalingMode.BUILTIN,
        statefulSet=f"rz-workers-{name}",
        models=models or ("tiny",),
        min=0,
        max=most,
        firstTokenSeconds=1.0,
        tokenMilliseconds=100.0,
        kvPercent=80.0,
        idleSeconds=60.0,
        scaleDownAfterSeconds=60.0,
    )


def fleet_of(workers: Mapping[str, dict[str, object]], model: str = "tiny") -> Fleet:
    """A fleet of these workers with these states."""
    fleet = Fleet("r", 30.0, BreakerLimits(), lambda: None)
    fleet.expect(frozenset({"tiny", "huge"}))
    for worker_id, fields in workers.items():
        fleet.join(Lease(worker_id, "i", "host:1", model, "serving"))
        state = worker_pb2.WorkerState(worker_id=worker_id, incarnation="i", phase=worker_pb2.PHASE_SERVING, **fields)  # type: ignore[arg-type]
        fleet.pools[model].update(worker_id, state, "r")
    return fleet


def view(fleet: Fleet) -> FleetView:
    return FleetView(fleet, lambda: True)


def held(fleet: Fleet, pools: Iterable[ScaledPool]) -> list[int]:
    scaling = Scaling(pools=tuple(pools))
    return [view(fleet).demand(each, scaling, HELD).held for each in scaling.pools]


def test_demand_sums_the_states_of_the_pool_s_own_workers() -> None:
    busy = {"running": 2, "waiting": 3, "queued_prefill_tokens": 50, "kv_blocks_used": 7}
    fleet = fleet_of({"rz-workers-a-0": busy, "rz-workers-a-1": busy, "rz-workers-a-x-1": busy, "other": busy})
    only = pool("a")
    demand = view(fleet).demand(only, Scaling(pools=(only,)), HELD)
    assert (demand.busy, demand.queued_tokens, demand.kv_used) == (10, 100, 14)
    assert (demand.held, demand.held_tokens, demand.idle_s, demand.complete) == (4, 400, 0.0, True)
    assert demand.tokens_per_s == pytest.approx(45.0), "half of the serving workers are the pool's"


def test_held_requests_are_those_of_the_first_pool_that_may_grow() -> None:
    both = pool("a"), pool("b")
    assert held(fleet_of({}), both) == [4, 0]
    assert held(fleet_of({"rz-workers-a-0": {}}), both) == [4, 0]
    full = {"rz-workers-a-0": {}, "rz-workers-a-1": {}}
    assert held(fleet_of(full), both) == [0, 4]
    assert held(fleet_of(full | {"rz-workers-b-0": {}, "rz-workers-b-1": {}}), both) == [0, 4]


def test_pool_of_several_models_has_the_demand_of_each() -> None:
    only = pool("a", "tiny", "huge")
    demand = view(fleet_of({})).demand(only, Scaling(pools=(only,)), HELD)
    assert (demand.held, demand.held_tokens, demand.tokens_per_s, demand.idle_s) == (6, 420, 90.0, 0.0)


def test_workers_of_one_pod_count_as_one_replica() -> None:
    one_pod = {"rz-workers-a-0.0": {"running": 2}, "rz-workers-a-0.1": {"running": 1}}
    fleet, both = fleet_of(one_pod), (pool("a"), pool("b"))
    capacity = view(fleet).capacity(both[0], 1)
    assert (capacity.workers, capacity.last_is_emptiest) == (1, True)
    assert held(fleet, both) == [4, 0], "a second pod may come"
    assert view(fleet).demand(both[0], Scaling(pools=both), HELD).busy == 3


def test_demand_is_incomplete_while_a_worker_a_router_or_the_leases_are_not_heard_of() -> None:
    fleet, only = fleet_of({"rz-workers-a-0": {}}), pool("a")
    scaling = Scaling(pools=(only,))
    assert view(fleet).demand(only, scaling, HELD).complete
    assert not FleetView(fleet, lambda: False).demand(only, scaling, HELD).complete
    assert not view(fleet).demand(only, scaling, DemandByModel({}, complete=False)).complete
    fleet.pools["tiny"].disconnected("rz-workers-a-0")
    assert not view(fleet).demand(only, scaling, HELD).complete


def test_capacity_is_measured_and_kept_at_zero() -> None:
    speed = {"prefill_tokens_per_s": 500.0, "decode_step_ms": 20.0, "kv_blocks_total": 64, "running": 1}
    fleet, only = fleet_of({"rz-workers-a-0": speed, "rz-workers-a-1": {"running": 3}}), pool("a")
    seen = view(fleet)
    capacity = seen.capacity(only, 2)
    assert (capacity.workers, capacity.prefill_rate, capacity.kv_blocks) == (2, 500.0, 64.0)
    assert capacity.batch > 1
    assert not capacity.last_is_emptiest
    for worker_id in list(fleet.pools["tiny"].members):
        fleet.lost(worker_id)
    at_zero = seen.capacity(only, 0)
    assert (at_zero.workers, at_zero.last_is_emptiest) == (0, True)
    assert (at_zero.prefill_rate, at_zero.batch, at_zero.kv_blocks) == (500.0, capacity.batch, 64.0)
    unmeasured = view(fleet_of({})).capacity(only, 0)
    assert (unmeasured.prefill_rate, unmeasured.batch, unmeasured.kv_blocks) == (0.0, 0.0, 0.0)


async def test_routers_are_asked_once_for_concurrent_readers() -> None:
    class Counting(routing_pb2_grpc.RouterServicer):
        calls = 0

        async def GetDemand(self, request: object, context: object) -> routing_pb2.GetDemandResponse:  # noqa: N802
            self.calls += 1
            models = [routing_pb2.ModelDemand(model="tiny", held=3)]
            return routing_pb2.GetDemandResponse(router_id="peer", models=models)

    server, servicer = new_server(), Counting()
    routing_pb2_grpc.add_RouterServicer_to_server(servicer, server)
    addresses = RouterAddresses([f"127.0.0.1:{bind(server, '127.0.0.1', 0)}"])
    await server.start()
    peers = RouterPeers(addresses, "own", fleet_of({}), Arrivals("own"), None)
    sums = await asyncio.gather(*(peers.read() for _ in range(5)))
    assert servicer.calls == 1
    assert {each.models["tiny"].requests for each in sums} == {3}
    assert not sums[0].complete, "this router's own address is not among them"
    await peers.close()
    await server.stop(None)


def test_arrivals_count_held_requests_and_forget_placed_tokens_by_half_lives() -> None:
    now = [100.0]
    arrivals = Arrivals("r", lambda: now[0])

    def tiny() -> tuple[int, int, float, float]:
        (demand,) = arrivals.demand(["tiny"]).models
        return demand.held, demand.held_tokens, demand.tokens_per_s, demand.idle_s

    now[0] += 5
    assert tiny() == (0, 0, 0.0, 5.0), "since the router's start"
    with arrivals.placing("tiny", 70) as arriving:
        assert tiny() == (1, 70, 0.0, 0.0)
        arriving.placed(30, now[0])
    first = tiny()
    assert first[:2] == (0, 0)
    now[0] += HALF_LIFE_S
    assert tiny() == (0, 0, pytest.approx(first[2] / 2), HALF_LIFE_S)
    with pytest.raises(ValueError, match="refused"), arrivals.placing("tiny", 70):
        raise ValueError("refused")
    assert tiny()[:2] == (0, 0)
    with arrivals.placing(None, 70):
        assert tiny()[0] == 0
    arrivals.forget(["tiny"])
    assert tiny()[2] == 0.0
