"""Requests without a worker wait: for a worker of an expected model, or for the first worker of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import httpx
import pytest
from ryzanstein.v1 import routing_pb2 as pb
from ryzanstein.v1 import worker_pb2

from services.common.leases import Lease, LeaseTable
from services.common.ports import free_port
from services.gateway.main import running_gateway
from services.router.breaker import BreakerLimits
from services.router.fleet import Fleet
from tests.integration.gateway.fleet import model_card
from tests.integration.gateway.gateways import fast_settings
from tests.integration.router.config_maps import ConfigMaps
from tests.integration.router.conftest import RouterRig
from tests.integration.router.fake_worker import FakeWorker
from tests.integration.router.processes import Service, page, router_process, until


def asked(model: str = "tiny") -> pb.RouteRequest:
    return pb.RouteRequest(request_id="r", model=model, prompt_tokens=10)


@pytest.mark.parametrize("expected", ["tiny, huge", ""])
async def test_a_request_waits_for_the_first_worker_and_is_refused_in_time(fleet: RouterRig, expected: str) -> None:
    service = fleet.process(
        router_process(fleet.redis_server.url_of("router"), QUEUE_TIMEOUT_S="1", EXPECTED_MODELS=expected)
    )
    router = await fleet.stub(service)
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.Route(asked())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "no worker serves tiny now"
    assert time.monotonic() - began > 0.9
    patient = pb.RouteRequest(request_id="r", model="tiny", prompt_tokens=10, patience_ms=120_000)
    waiting = asyncio.ensure_future(router.Route(patient))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await fleet.worker("first")
    placed = await waiting
    assert placed.worker_id == "first"


async def test_expected_models_are_known_and_unexpected_models_are_not(fleet: RouterRig) -> None:
    port = free_port()
    environment = {"EXPECTED_MODELS": "tiny,huge", "METRICS_PORT": str(port), "QUEUE_TIMEOUT_S": "0.5"}
    router = await fleet.stub(fleet.process(router_process(fleet.redis_server.url_of("router"), **environment)))
    shown = await asyncio.to_thread(page, port)
    for model in ("tiny", "huge"):
        assert f'ryzanstein_router_queue_length{{model="{model}"}} 0.0' in shown
    assert list((await router.ListWorkers(pb.ListWorkersRequest())).expected_models) == ["huge", "tiny"]
    worker = await fleet.worker("w")
    for _ in range(2):  # before it was there, or with another model's worker: unknown
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await router.Route(asked("typo"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        assert "tiny" in (unknown.value.details() or "")
        await until(lambda: _places(router))
    with pytest.raises(grpc.aio.AioRpcError) as nobody:
        await router.Route(asked("huge"))
    assert nobody.value.code() is grpc.StatusCode.UNAVAILABLE
    await worker.stop()

    async def gone() -> bool:
        return not await _places(router)

    await until(gone)
    with pytest.raises(grpc.aio.AioRpcError) as empty:
        await router.Route(asked())
    assert empty.value.code() is grpc.StatusCode.UNAVAILABLE, "its workers may come back"


class CardWorker(FakeWorker):
    """A worker whose model gateways serve."""

    async def GetModelCard(self, request: object, context: object) -> worker_pb2.ModelCard:  # noqa: N802
        return model_card(self.worker_id, self.incarnation, self.model)


@asynccontextmanager
async def watching(fleet: RouterRig, config_maps: ConfigMaps) -> AsyncIterator[tuple[Service, httpx.AsyncClient]]:
    """A router that watches the ConfigMap, and a gateway of its own; a worker serves `tiny`."""
    environment = {"QUEUE_TIMEOUT_S": "0.2", **config_maps.environment}
    service = fleet.process(router_process(fleet.redis_server.url_of("router"), **environment))
    worker = CardWorker("w")
    await worker.start(fleet.redis, fleet.keys)
    async with (
        running_gateway(fast_settings(router_addresses=service.address, patience_s=0.2)) as gateway,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http.port}", trust_env=False, timeout=60) as client,
    ):
        async with asyncio.timeout(60):
            while not gateway.catalog.available():  # noqa: ASYNC110  # the router is another process
                await asyncio.sleep(0.02)
        yield service, client
    await worker.stop()


async def answers(client: httpx.AsyncClient, model: str, status: int) -> httpx.Response:
    """The first answer of this status; others before it are of the state before."""
    async with asyncio.timeout(60):
        while True:
            answer = await client.post("/v1/completions", json={"model": model, "prompt": "a", "max_tokens": 1})
            if answer.status_code == status:
                return answer
            await asyncio.sleep(0.02)


async def test_a_new_model_of_the_config_map_is_known_to_running_routers_and_gateways(
    fleet: RouterRig, config_maps: ConfigMaps
) -> None:
    config_maps.write("tiny", "zero")
    async with watching(fleet, config_maps) as (_, client):
        await answers(client, "huge", 404)
        watches = config_maps.watches
        config_maps.write("tiny", "zero", "huge")
        refused = await answers(client, "huge", 503)
        assert config_maps.watches == watches, "the event of an open watch brings it, not the next look"
        assert refused.headers["retry-after"]
        assert "`huge`" in refused.json()["error"]["message"], "it has waited in the router's queue"
        assert {model["id"] for model in (await client.get("/v1/models")).json()["data"]} == {"tiny", "zero", "huge"}
        config_maps.write("tiny")
        await answers(client, "huge", 404)


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda api: api.remove(), "has no key 'expected' any more"),
        (lambda api: api.refuse(403), "the API server answers 403"),
        (lambda api: api.server_close(), "refused"),
    ],
    ids=["deleted", "forbidden", "away"],
)
async def test_expected_models_stay_while_their_config_map_cannot_be_read(
    fleet: RouterRig, config_maps: ConfigMaps, harm: Callable[[ConfigMaps], None], words: str
) -> None:
    config_maps.write("tiny", "huge")
    async with watching(fleet, config_maps) as (router, client):
        await answers(client, "huge", 503)
        await answers(client, "typo", 404)
        harm(config_maps)

        async def warned() -> bool:
            return any(words in line["message"] for line in router.logs())

        await until(warned)
        assert (await answers(client, "huge", 503)).json()["error"]["code"] == "no_workers"
        await answers(client, "typo", 404)


async def test_an_unknown_model_is_not_denied_before_the_config_map_was_read(
    fleet: RouterRig, config_maps: ConfigMaps
) -> None:
    """The router serves what has workers, and reads the names as soon as there are any."""
    async with watching(fleet, config_maps) as (router, client):
        assert (await answers(client, "huge", 503)).headers["retry-after"]
        assert any("there is no ConfigMap llm/ryzanstein-models" in line["message"] for line in router.logs())
        config_maps.write("tiny")
        await answers(client, "huge", 404)


async def test_a_model_is_known_and_listed_from_its_first_worker_s_lease(fleet: RouterRig) -> None:
    """In every phase: gateways learn from the list that requests for the model wait."""
    router = await fleet.stub(fleet.process(router_process(fleet.redis_server.url, QUEUE_TIMEOUT_S="0.2")))
    await fleet.worker("w")
    await until(lambda: _places(router))
    nowhere = f"127.0.0.1:{free_port()}"
    await LeaseTable(fleet.redis, fleet.keys).write(Lease("first", "i", nowhere, "huge", "loading"))

    async def listed() -> bool:
        return "huge" in {view.model for view in (await router.ListWorkers(pb.ListWorkersRequest())).workers}

    await until(listed)
    with pytest.raises(grpc.aio.AioRpcError) as waited:
        await router.Route(asked("huge"))
    assert waited.value.code() is grpc.StatusCode.UNAVAILABLE


async def _places(router: object) -> bool:
    try:
        await router.Route(asked())  # type: ignore[attr-defined]
    except grpc.aio.AioRpcError:
        return False
    return True


def test_unexpected_model_is_forgotten_ten_minutes_after_its_last_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [1000.0]
    monkeypatch.setattr("services.router.fleet.time.monotonic", lambda: now[0])
    fleet = Fleet("r", 30.0, BreakerLimits(), lambda: None)
    fleet.expect(frozenset({"tiny"}))
    for worker, model in (("a", "tiny"), ("b", "huge"), ("c", "huge")):
        fleet.join(Lease(worker, "i", "host:1", model, "serving"))
    fleet.lost("a")
    fleet.lost("b")
    now[0] += 700
    assert fleet.forget([]) == []
    fleet.lost("c")
    now[0] += 590
    assert fleet.forget([]) == []
    fleet.join(Lease("c", "j", "host:1", "huge", "serving"))
    now[0] += 700
    assert fleet.forget([]) == []
    fleet.lost("c")
    now[0] += 601
    assert fleet.forget(["huge"]) == [], "requests wait for it"
    assert fleet.forget([]) == ["huge"]
    assert set(fleet.pools) == {"tiny"}
    fleet.expect(frozenset({"other"}))
    assert fleet.forget([]) == ["tiny"], "empty for so long, and not expected any more"
    fleet.expect(frozenset())
    assert fleet.forget([]) == []
    now[0] += 601
    assert fleet.forget([]) == ["other"]


async def test_a_worker_that_cannot_be_reached_is_named_once_with_its_address_and_the_cause(fleet: RouterRig) -> None:
    service = fleet.process(router_process(fleet.redis_server.url_of("router")))
    nowhere = f"127.0.0.1:{free_port()}"
    await LeaseTable(fleet.redis, fleet.keys).write(Lease("lost", "i", nowhere, "tiny", "serving"))

    async def warned() -> bool:
        return bool(broken(service))

    await until(warned)
    await asyncio.sleep(1)
    (line,) = broken(service)
    assert "lost" in line
    assert nowhere in line
    assert "UNAVAILABLE" in line


def broken(service: Service) -> list[str]:
    return [line["message"] for line in service.logs() if "state stream of" in line["message"]]
