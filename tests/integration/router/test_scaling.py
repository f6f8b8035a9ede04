"""Routers scale pools: the leader through the StatefulSet's scale, or KEDA by their demand."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
import pytest
from ryzanstein.keda import externalscaler_pb2 as keda
from ryzanstein.keda import externalscaler_pb2_grpc
from ryzanstein.v1 import routing_pb2 as pb
from ryzanstein.v1 import routing_pb2_grpc

from services.common.ports import free_port
from services.common.rpc import open_channel
from services.router.api_server import ApiServer, KubernetesError
from services.router.scaling.election import LEASE_S, Election
from tests.integration.router.config_maps import NAMESPACE, ConfigMaps
from tests.integration.router.conftest import RouterRig, ask, lists
from tests.integration.router.processes import Service, page, router_process, until

SET = "rz-workers-default"
SCALE = f"/apis/apps/v1/namespaces/{NAMESPACE}/statefulsets/{SET}/scale"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases/rz-scaler"
REFERENCE = keda.ScaledObjectRef(name=SET, namespace=NAMESPACE, scalerMetadata={"pool": "default"})
POOL: dict[str, object] = {
    "name": "default",
    "mode": "builtin",
    "statefulSet": SET,
    "models": ["tiny"],
    "min": 0,
    "max": 3,
    "firstTokenSeconds": 2.5,
    "tokenMilliseconds": 100,
    "kvPercent": 80,
    "idleSeconds": 3,
    "scaleDownAfterSeconds": 2,
    "aLaterVersionsField": 1,
}


def scaling(**fields: object) -> dict[str, object]:
    return {"lease": "rz-scaler", "pools": [POOL | fields]}


@dataclass(frozen=True)
class ScalingRouter:
    service: Service
    stub: routing_pb2_grpc.RouterStub
    metrics_port: int

    def metric(self, name: str) -> float | None:
        """The value of a series; None if it is not there."""
        line = re.search(rf"^{re.escape(name)} (\S+)$", page(self.metrics_port), re.MULTILINE)
        return float(line[1]) if line else None

    async def shows(self, name: str, value: float) -> None:
        async def shown() -> bool:
            return await asyncio.to_thread(self.metric, name) == value

        await until(shown)

    async def logs(self, words: str) -> None:
        async def logged() -> bool:
            return any(words in line["message"] for line in self.service.logs())

        await until(logged)


async def routers(fleet: RouterRig, api: ConfigMaps, *ids: str, more: str = "") -> list[ScalingRouter]:
    """Routers that know each other; `more`: another router's address."""
    ports = [free_port() for _ in ids]
    peers = ",".join([*(f"127.0.0.1:{port}" for port in ports), *filter(None, [more])])
    running = []
    for router_id, port in zip(ids, ports, strict=True):
        metrics_port = free_port()
        service = fleet.process(
            router_process(
                fleet.redis_server.url_of("router"),
                **api.environment,
                ROUTER_ID=router_id,
                ROUTER_PORT=str(port),
                ROUTER_PEERS=peers,
                METRICS_PORT=str(metrics_port),
                QUEUE_TIMEOUT_S="60",
            )
        )
        running.append(ScalingRouter(service, await fleet.stub(service), metrics_port))
    return running


async def wait_for_replicas(api: ConfigMaps, replicas: int) -> None:
    async def reached() -> bool:
        return int(api.spec(SCALE).get("replicas", 0)) == replicas

    await until(reached)


def at(api: ConfigMaps, replicas: int, **fields: object) -> None:
    """A pool of that many replicas, which no router leads yet."""
    api.put(LEASE, {})
    api.put(SCALE, {"replicas": replicas})
    api.write("tiny", scaling=scaling(**fields))


async def test_leader_scales_from_zero_for_a_request_held_by_another_router_and_back_after_idleness(
    fleet: RouterRig, config_maps: ConfigMaps
) -> None:
    at(config_maps, 0)
    first, second = await routers(fleet, config_maps, "rz-router-0", "rz-router-1")

    async def led() -> bool:
        return bool(config_maps.spec(LEASE).get("holderIdentity"))

    await until(led)
    leader, follower = (
        (first, second) if config_maps.spec(LEASE)["holderIdentity"] == "rz-router-0" else (second, first)
    )
    await leader.shows("ryzanstein_router_scaler_leads", 1.0)
    await follower.shows("ryzanstein_router_scaler_leads", 0.0)
    assert config_maps.spec(SCALE) == {}
    held = asyncio.ensure_future(follower.stub.Route(ask(model="tiny")))
    await wait_for_replicas(config_maps, 1)
    assert not held.done()
    worker = await fleet.worker(f"{SET}-0")
    assert (await held).worker_id == f"{SET}-0"
    await leader.logs("pool default: 1 replicas instead of 0 (held): 1 requests held")
    await leader.shows('ryzanstein_router_pool_replicas{kind="current",pool="default"}', 1.0)
    await leader.shows('ryzanstein_router_scalings_total{pool="default",reason="held"}', 1.0)
    await wait_for_replicas(config_maps, 0)
    await leader.logs("pool default: 0 replicas instead of 1 (idle)")
    await worker.stop()
    assert follower.metric('ryzanstein_router_pool_replicas{kind="current",pool="default"}') is None
    leader.service.end()
    await follower.shows("ryzanstein_router_scaler_leads", 1.0)
    assert config_maps.spec(LEASE)["leaseTransitions"] == 2, "the leader has resigned"


async def test_pool_grows_by_demand_and_schedule_and_shrinks_by_its_emptiest_worker(
    fleet: RouterRig, config_maps: ConfigMaps
) -> None:
    at(config_maps, 1, min=1)
    first = await fleet.worker(f"{SET}-0", running=2, waiting=4, queued_prefill_tokens=60_000, kv_blocks_used=100)
    (router,) = await routers(fleet, config_maps, "rz-router-0")
    await wait_for_replicas(config_maps, 3)  # 60,000 tokens at 10,000 a second, in 2.5 s
    await router.logs("(backlog)")
    second, third = await fleet.worker(f"{SET}-1"), await fleet.worker(f"{SET}-2", running=1)
    first.update(waiting=0, queued_prefill_tokens=0, kv_blocks_used=0)
    await until(lambda: lists(router.stub, f"{SET}-2"))
    third.update(running=0)
    await wait_for_replicas(config_maps, 2)
    await router.logs("pool default: 2 replicas instead of 3 (surplus)")
    await third.stop()
    await wait_for_replicas(config_maps, 1)
    await second.stop()
    config_maps.write("tiny", scaling=scaling(min=1, schedule=[{"hour": hour, "min": 2} for hour in range(24)]))
    await wait_for_replicas(config_maps, 2)
    await router.logs("pool default: 2 replicas instead of 1 (bounds): 0 requests held")


async def test_pool_does_not_shrink_while_a_router_is_silent_but_grows(
    fleet: RouterRig, config_maps: ConfigMaps
) -> None:
    at(config_maps, 1)
    worker = await fleet.worker(f"{SET}-0")
    silent = f"127.0.0.1:{free_port()}"
    (router,) = await routers(fleet, config_maps, "rz-router-0", more=silent)
    await router.shows('ryzanstein_router_pool_replicas{kind="current",pool="default"}', 1.0)
    await router.logs(f"router {silent} does not report its demand, no worker is removed: UNAVAILABLE")
    async with open_channel(router.service.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as unknown:  # KEDA keeps the replicas after an error
            await externalscaler_pb2_grpc.ExternalScalerStub(channel).IsActive(REFERENCE)
    assert unknown.value.code() is grpc.StatusCode.UNAVAILABLE
    worker.update(running=2, waiting=3, queued_prefill_tokens=40_000)
    await wait_for_replicas(config_maps, 2)
    assert config_maps.writes.count(SCALE) == 1


async def test_failures_of_the_api_server_are_logged_once_and_leave_the_replicas(
    fleet: RouterRig, config_maps: ConfigMaps
) -> None:
    at(config_maps, 0, idleSeconds=600)
    (router,) = await routers(fleet, config_maps, "rz-router-0")
    await router.shows("ryzanstein_router_scaler_leads", 1.0)
    config_maps.write("tiny", scaling=scaling(mode="magic"))
    await router.logs("the ConfigMap's key scaling cannot be read, the scaled pools stay")
    assert router.metric("ryzanstein_router_scaler_pools") == 1.0
    failures: dict[str, Callable[[], object]] = {
        f"{SET} cannot be scaled: the API server answers 404": lambda: config_maps.objects.pop(SCALE),
        "the lease rz-scaler cannot be held; the chart makes it": lambda: config_maps.objects.pop(LEASE),
        "the lease rz-scaler cannot be held: the API server answers 403": lambda: config_maps.refuse(403),
    }
    for words, harm in failures.items():
        harm()
        await router.logs(words)
        config_maps.refused = 0
        config_maps.put(LEASE, {})
        config_maps.put(SCALE, {})
        await router.shows("ryzanstein_router_scaler_leads", 1.0)
    messages = [line["message"] for line in router.service.logs()]
    assert [sum(words in message for message in messages) for words in failures] == [1, 1, 1]
    # `kubectl scale` between the read and the write: the next evaluation begins with the new number.
    config_maps.before["PATCH"] = lambda: config_maps.put(SCALE, {"replicas": 2})
    held = asyncio.ensure_future(router.stub.Route(ask(model="tiny")))
    await router.shows('ryzanstein_router_pool_replicas{kind="current",pool="default"}', 2.0)
    assert SCALE not in config_maps.writes
    held.cancel()


@pytest.fixture
def clock() -> list[float]:
    return [1000.0]


def election(api: ConfigMaps, identity: str, clock: list[float]) -> Election:
    return Election(ApiServer(Path(api.environment["SERVICE_ACCOUNT_FOLDER"])), identity, lambda: clock[0])


async def test_lease_passes_to_another_router_only_after_its_end(config_maps: ConfigMaps, clock: list[float]) -> None:
    config_maps.put(LEASE, {})
    one, two = election(config_maps, "one", clock), election(config_maps, "two", clock)
    await one.campaign("rz-scaler")
    await two.campaign("rz-scaler")
    assert (one.leads, two.leads) == (True, False)
    clock[0] += LEASE_S - 1
    await two.campaign("rz-scaler")
    assert (one.leads, two.leads) == (False, False), "a leader that does not renew stops first"
    clock[0] += 2
    await two.campaign("rz-scaler")
    await one.campaign("rz-scaler")
    assert (one.leads, two.leads) == (False, True)
    assert config_maps.spec(LEASE)["holderIdentity"] == "two"


async def test_renewed_lease_stays_with_its_leader(config_maps: ConfigMaps, clock: list[float]) -> None:
    config_maps.put(LEASE, {})
    one, two = election(config_maps, "one", clock), election(config_maps, "two", clock)
    for _ in range(10):
        await one.campaign("rz-scaler")
        await two.campaign("rz-scaler")
        assert (one.leads, two.leads) == (True, False)
        clock[0] += LEASE_S / 3
    assert config_maps.spec(LEASE)["leaseTransitions"] == 1


async def test_router_does_not_lead_when_its_write_of_the_lease_conflicts(
    config_maps: ConfigMaps, clock: list[float]
) -> None:
    config_maps.put(LEASE, {})
    config_maps.before["PUT"] = lambda: config_maps.put(LEASE, {"holderIdentity": "quicker", "leaseDurationSeconds": 6})
    slower = election(config_maps, "slower", clock)
    await slower.campaign("rz-scaler")
    assert not slower.leads
    assert config_maps.spec(LEASE)["holderIdentity"] == "quicker"


async def test_leader_leads_on_without_the_api_server_until_its_lease_is_over(
    config_maps: ConfigMaps, clock: list[float]
) -> None:
    config_maps.put(LEASE, {})
    leader = election(config_maps, "one", clock)
    await leader.campaign("rz-scaler")
    config_maps.refused = 503
    clock[0] += 3
    with pytest.raises(KubernetesError, match="503"):
        await leader.campaign("rz-scaler")
    assert leader.leads
    clock[0] += LEASE_S
    assert not leader.leads


async def test_keda_s_client_hears_of_a_held_request_and_of_the_demand(
    fleet: RouterRig, config_maps: ConfigMaps
) -> None:
    config_maps.write("tiny", scaling=scaling(mode="keda"))
    first, second = await routers(fleet, config_maps, "rz-router-0", "rz-router-1")
    await first.shows("ryzanstein_router_scaler_pools", 0.0)
    async with open_channel(first.service.address) as channel:
        scaler = externalscaler_pb2_grpc.ExternalScalerStub(channel)

        async def known() -> bool:
            try:
                return bool((await scaler.GetMetricSpec(REFERENCE)).metricSpecs)
            except grpc.aio.AioRpcError:
                return False

        await until(known)
        (spec,) = (await scaler.GetMetricSpec(REFERENCE)).metricSpecs
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await scaler.IsActive(keda.ScaledObjectRef(scalerMetadata={"pool": "typo"}))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert unknown.value.details() == "scalerMetadata.pool: 'typo' is not scaled; pools are default"
        held = asyncio.ensure_future(second.stub.Route(ask(model="tiny")))
        pushed = scaler.StreamIsActive(REFERENCE)
        async with asyncio.timeout(60):
            while not (await pushed.read()).result:
                pass
        assert (await scaler.IsActive(REFERENCE)).result
        request = keda.GetMetricsRequest(scaledObjectRef=REFERENCE, metricName=spec.metricName)

        async def one_worker_for_one_request() -> bool:
            (value,) = (await scaler.GetMetrics(request)).metricValues
            return (value.metricName, value.metricValue) == (spec.metricName, spec.targetSize)

        await until(one_worker_for_one_request)  # the pool is active for a while after the start, also without requests
        await fleet.worker(f"{SET}-0", running=4, waiting=6, queued_prefill_tokens=60_000)
        await held

        async def more() -> bool:
            (value,) = (await scaler.GetMetrics(request)).metricValues
            return value.metricValue >= 2 * spec.targetSize

        await until(more)
        pushed.cancel()
    assert not config_maps.writes, "KEDA alone scales"


async def test_demand_of_a_router_counts_its_held_requests(fleet: RouterRig, config_maps: ConfigMaps) -> None:
    config_maps.write("tiny")
    (router,) = await routers(fleet, config_maps, "rz-router-0")
    before = await router.stub.GetDemand(pb.GetDemandRequest())
    assert (before.router_id, [model.held for model in before.models]) == ("rz-router-0", [0])
    held = [asyncio.ensure_future(router.stub.Route(ask(f"r{i}", model="tiny"))) for i in range(3)]

    async def counted() -> bool:
        (tiny,) = (await router.stub.GetDemand(pb.GetDemandRequest())).models
        return (tiny.model, tiny.held, tiny.held_tokens, tiny.idle_s) == ("tiny", 3, 300, 0.0)

    await until(counted)
    await fleet.worker("w")
    await asyncio.gather(*held)
    (after,) = (await router.stub.GetDemand(pb.GetDemandRequest())).models
    assert (after.held, after.held_tokens) == (0, 0)
    assert after.tokens_per_s > 0
