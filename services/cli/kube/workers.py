"""Shows and drains the workers of an installation in a cluster, through its router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import grpc
from kubernetes import client
from rich.console import Console
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from services.cli import status
from services.cli.errors import CommandError
from services.cli.kube.admin import admin_tls
from services.cli.kube.cluster import asking, certificates, ready_pods
from services.cli.kube.diagnosis.certificates import ends_of
from services.cli.kube.diagnosis.snapshot import name
from services.cli.kube.forward import forwarded
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls

_ROUTER, _COORDINATOR = 50052, 50053
_RPC_S = 10.0
_POLL_S = 0.5


def show_status(namespace: str, release: str, *, as_json: bool) -> None:
    """Show what `ryzanstein status` shows, through port-forwards."""
    with _router(namespace, release) as (router, tls), ExitStack() as stack:
        coordinators = [
            stack.enter_context(forwarded(namespace, name(pod), _COORDINATOR))
            for pod in ready_pods(namespace, release, "coordinator")
        ]
        ends = ends_of(certificates(namespace, release)) if tls else {}
        status.show(router, coordinators, as_json=as_json, tls=tls, certificates=ends)


def drain(namespace: str, release: str, pod: str, grace_s: float, *, keep: bool) -> None:
    """Let a worker finish its requests or hand them off, then delete its pod unless `keep`."""
    with _router(namespace, release) as (router, tls):
        asyncio.run(empty(router, pod, grace_s, tls))
    Console().print(f"{pod} has no requests any more", highlight=False)
    if keep:
        return
    with asking(f"pod {namespace}/{pod}"):
        client.CoreV1Api().delete_namespaced_pod(pod, namespace)
    Console().print(f"pod {namespace}/{pod} is deleted; its set makes it anew", highlight=False)


async def empty(router: str, pod: str, grace_s: float, tls: Tls | None = None) -> None:
    """Drain the workers of a pod, and return once they have no requests. The chart names workers after their pods.

    Raises CommandError if the router knows no such worker, or if one has requests some seconds after the grace.
    """
    async with open_channel(router, to="router", tls=tls) as channel:
        stub = routing_pb2_grpc.RouterStub(channel)
        try:
            names = {view.worker_id for view in (await _list(stub)).workers}
            drained = {each for each in names if each == pod or each.startswith(f"{pod}.")}
            if not drained:
                raise CommandError(f"the router knows no worker {pod}, only {', '.join(sorted(names)) or 'none'}")
            grace_ms = int(grace_s * 1000)
            requests = [routing_pb2.DrainWorkerRequest(worker_id=each, grace_ms=grace_ms) for each in drained]
            await asyncio.gather(*(stub.DrainWorker(request, timeout=grace_s + _RPC_S) for request in requests))
            deadline = time.monotonic() + grace_s + _RPC_S
            while any(view.worker_id in drained and view.state.running for view in (await _list(stub)).workers):
                if time.monotonic() > deadline:
                    raise CommandError(f"{pod} still has requests after {grace_s + _RPC_S:.0f} s")
                await asyncio.sleep(_POLL_S)
        except grpc.aio.AioRpcError as error:
            raise CommandError(f"the router refuses: {error.details()}") from error


async def _list(stub: routing_pb2_grpc.RouterAsyncStub) -> routing_pb2.ListWorkersResponse:
    return await stub.ListWorkers(routing_pb2.ListWorkersRequest(), timeout=_RPC_S)


@contextmanager
def _router(namespace: str, release: str) -> Iterator[tuple[str, Tls | None]]:
    """The local address of a ready router, and what to call it with."""
    pods = ready_pods(namespace, release, "router")
    if not pods:
        raise CommandError(f"no router of {release} in {namespace} is ready; see: ryzanstein kube doctor")
    with forwarded(namespace, name(pods[0]), _ROUTER) as address, admin_tls(namespace, pods[0]) as tls:
        yield address, tls
