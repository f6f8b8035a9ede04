"""Requests without a worker wait: for a worker of an expected model, or for the first worker of all."""

from __future__ import annotations

import asyncio
import time
import urllib.request
from pathlib import Path

import grpc
import pytest
from ryzanstein.v1 import routing_pb2 as pb

from services.common.leases import Lease, LeaseTable
from services.common.ports import free_port
from services.router.breaker import BreakerLimits
from services.router.fleet import Fleet
from tests.integration.router.conftest import RouterRig
from tests.integration.router.processes import Service, router_process, until
from tests.mounted import MountedFile


def asked(model: str = "tiny") -> pb.RouteRequest:
    return pb.RouteRequest(request_id="r", model=model, prompt_tokens=10)


@pytest.mark.parametrize("expected", ["tiny, huge", ""])
async def test_a_request_waits_for_the_first_worker_and_is_refused_in_time(fleet: RouterRig, expected: str) -> None:
    service = fleet.process(
        router_process(fleet.redis_server.url_of("router"), QUEUE_TIMEOUT_S="4", EXPECTED_MODELS=expected)
    )
    router = await fleet.stub(service)
    began = time.monotonic()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await router.Route(asked())
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert refused.value.details() == "no worker serves tiny now"
    assert 3.5 < time.monotonic() - began < 30
    waiting = asyncio.ensure_future(router.Route(asked()))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    await fleet.worker("first")
    placed = await waiting
    assert placed.worker_id == "first"


async def test_expected_models_are_known_and_unexpected_models_are_not(fleet: RouterRig) -> None:
    port = free_port()
    environment = {"EXPECTED_MODELS": "tiny,huge", "METRICS_PORT": str(port), "QUEUE_TIMEOUT_S": "0.5"}
    router = await fleet.stub(fleet.process(router_process(fleet.redis_server.url_of("router"), **environment)))

    def metrics() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            return str(answer.read().decode())

    shown = await asyncio.to_thread(metrics)
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


async def test_a_running_router_hears_which_models_are_expected(fleet: RouterRig, tmp_path: Path) -> None:
    names = MountedFile(tmp_path, "tiny\n")
    environment = {"EXPECTED_MODELS_FILE": str(names.path), "QUEUE_TIMEOUT_S": "0.1"}
    service = fleet.process(router_process(fleet.redis_server.url_of("router"), **environment))
    router = await fleet.stub(service)

    async def refusal(model: str) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.Route(asked(model))
        return refused.value.code()

    async def huge_is_known() -> bool:
        return await refusal("huge") is grpc.StatusCode.UNAVAILABLE

    async def warned() -> bool:
        return any("EXPECTED_MODELS_FILE cannot be read" in line["message"] for line in service.logs())

    assert await refusal("tiny") is grpc.StatusCode.UNAVAILABLE
    assert await refusal("huge") is grpc.StatusCode.NOT_FOUND
    names.write("tiny\nhuge\n")
    await until(huge_is_known)
    names.remove()
    await until(warned)
    assert await huge_is_known(), "the names that were read last stay"


async def test_a_model_is_known_and_listed_from_its_first_worker_s_lease(fleet: RouterRig) -> None:
    """Whatever its phase: gateways learn from the list that requests for the model wait."""
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
    assert fleet.forget() == []
    fleet.lost("c")
    now[0] += 590
    assert fleet.forget() == []
    fleet.join(Lease("c", "j", "host:1", "huge", "serving"))
    now[0] += 700
    assert fleet.forget() == []
    fleet.lost("c")
    now[0] += 601
    assert fleet.forget() == ["huge"]
    assert set(fleet.pools) == {"tiny"}
    fleet.expect(frozenset({"other"}))
    assert fleet.forget() == ["tiny"], "empty for so long, and not expected any more"
    fleet.expect(frozenset())
    assert fleet.forget() == []
    now[0] += 601
    assert fleet.forget() == ["other"]


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
