"""`ryzanstein kube status` and `drain-worker`, as far as a router and a coordinator behind the API server."""

from __future__ import annotations

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, routing_pb2, routing_pb2_grpc, worker_pb2
from typer.testing import CliRunner, Result

from services.cli.main import app
from services.common.rpc import bind, new_server
from services.common.tls.credentials import Tls
from services.common.tls.issuing import Authority
from tests.certificates import DAY, write
from tests.kube_api import KubeApi, Object
from tests.unit.cli.kube.objects import pod

ROUTER, COORDINATOR, WORKER = "ryzanstein-router-0", "ryzanstein-coordinator-77b-y", "ryzanstein-workers-default-0"


class DrainingRouter(routing_pb2_grpc.RouterServicer):
    """Knows a worker whose only request ends when it is asked to drain."""

    def __init__(self) -> None:
        self.running = 1
        self.grace_ms: list[int] = []
        self.refusal = ""

    async def ListWorkers(self, request: object, context: object) -> routing_pb2.ListWorkersResponse:  # noqa: N802
        state = worker_pb2.WorkerState(phase=worker_pb2.PHASE_SERVING, running=self.running)
        view = routing_pb2.WorkerView(worker_id=WORKER, model="m", eligible=True, state=state)
        return routing_pb2.ListWorkersResponse(router_id="r", policy="cost", workers=[view])

    async def DrainWorker(self, request: routing_pb2.DrainWorkerRequest, context: Any) -> worker_pb2.DrainResponse:  # noqa: N802
        if self.refusal:
            await context.abort(grpc.StatusCode.UNAVAILABLE, self.refusal)
        self.grace_ms.append(request.grace_ms)
        self.running = 0
        return worker_pb2.DrainResponse()


class Coordinator(kv_pb2_grpc.KvCoordinatorServicer):
    async def Stats(self, request: object, context: object) -> kv_pb2.StatsResponse:  # noqa: N802
        return kv_pb2.StatsResponse(blocks=7, entries=9)


@asynccontextmanager
async def serving(router: DrainingRouter, certificates: Path | None) -> AsyncIterator[dict[str, str]]:
    """The addresses of a router and a coordinator, by pod and port."""
    addresses, servers = {}, []
    for component, place in (("router", f"{ROUTER}:50052"), ("coordinator", f"{COORDINATOR}:50053")):
        tls = Tls(certificates / component) if certificates else None
        server = new_server(tls=tls)
        routing_pb2_grpc.add_RouterServicer_to_server(router, server)
        kv_pb2_grpc.add_KvCoordinatorServicer_to_server(Coordinator(), server)
        addresses[place] = f"127.0.0.1:{bind(server, '127.0.0.1', 0, tls)}"
        await server.start()
        servers.append(server)
    yield addresses
    for server in servers:
        await server.stop(0)


@contextmanager
def installed(api: KubeApi, certificates: Path | None = None) -> Iterator[DrainingRouter]:
    """An installation with a router, a coordinator and a worker, under mutual TLS where there are certificates."""
    router, begun, ended = DrainingRouter(), threading.Event(), threading.Event()

    async def serve() -> None:
        async with serving(router, certificates) as addresses:
            api.ports.update(addresses)
            begun.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    begun.wait()
    pods = [pod(ROUTER, "router"), pod(COORDINATOR, "coordinator"), pod(WORKER, "worker")]
    if certificates:
        for actual, component in zip(pods, ("router", "coordinator", "worker"), strict=True):
            actual["spec"]["volumes"] = [{"name": "tls", "secret": {"secretName": f"rz-tls-{component}"}}]
    api.put("pods", *pods)
    try:
        yield router
    finally:
        ended.set()
        thread.join()


def secret(folder: Path) -> Object:
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in folder.iterdir()}
    return {"metadata": {"name": f"rz-tls-{folder.name}"}, "data": data}


def kube(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["kube", *arguments])


def test_status_shows_router_and_coordinator_reports(api: KubeApi) -> None:
    with installed(api):
        status = kube("status")
        assert status.exit_code == 0, status.output
        assert WORKER in status.output
        assert "KV coordinator: 7 distinct prefix blocks known, 9 entries" in status.output
        del api.objects["pods", COORDINATOR]
        alone = kube("status", "--json")
        assert alone.exit_code == 0, alone.output
        answer = json.loads(alone.output)
        assert (answer["router"]["workers"][0]["worker_id"], answer["kv_coordinator"]) == (WORKER, None)


def test_status_uses_the_administrators_certificate_under_mutual_tls(api: KubeApi, tmp_path: Path) -> None:
    authority, folder = Authority.new(DAY), tmp_path / "certificates"
    for component in ("router", "coordinator", "worker", "admin"):
        write(folder / component, component, authority, life=DAY / 2)
    with installed(api, folder):
        missing = kube("status")
        assert missing.exit_code == 1
        assert "secret llm/rz-tls-admin, to call the router with: NotFound (404)" in missing.output
        api.put("secrets", {"metadata": {"name": "rz-tls-admin"}, "data": {}})
        assert "secret llm/rz-tls-admin: " in kube("status").output
        api.put("secrets", *map(secret, folder.iterdir()))
        status = kube("status")
        assert status.exit_code == 0, status.output
        assert "mutual TLS: the first certificate to end is rz-tls-coordinator, in 0 days" in status.output


def test_a_drained_worker_s_pod_is_deleted(api: KubeApi) -> None:
    with installed(api) as router:
        router.refusal = "worker does not answer"
        refused = kube("drain-worker", WORKER)
        assert (refused.exit_code, refused.output) == (1, "ryzanstein: the router refuses: worker does not answer\n")
        router.refusal = ""
        drained = kube("drain-worker", WORKER, "--grace", "5", "--keep")
        assert (drained.exit_code, drained.output) == (0, f"{WORKER} has no requests any more\n")
        assert router.grace_ms == [5000]
        assert ("pods", WORKER) in api.objects
        api.refused["DELETE pods"] = 403
        forbidden = kube("drain-worker", WORKER)
        assert forbidden.exit_code == 1
        assert f"pod llm/{WORKER}: Forbidden (403)" in forbidden.output
        api.refused.clear()
        done = kube("drain-worker", WORKER)
        assert done.exit_code == 0, done.output
        assert f"pod llm/{WORKER} is deleted; its set makes it anew" in done.output
        assert ("pods", WORKER) not in api.objects
