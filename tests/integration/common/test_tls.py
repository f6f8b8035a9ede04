"""Mutual TLS between services: who may call what, certificates that are renewed, and the way from plain text."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from ryzanstein.v1 import kv_pb2, routing_pb2, worker_pb2

from services.common.lifecycle import StartupError, read_settings
from services.common.rpc import open_channel
from services.common.settings import ServiceSettings
from services.common.tls.access import CALLERS, COMPONENTS
from services.common.tls.credentials import Tls
from services.common.tls.issuing import Authority
from tests.certificates import DAY, DOMAIN, write
from tests.integration.gateway.process import GatewayProcess, gateway_process
from tests.integration.router.processes import KillableRedis, coordinator_process, router_process, running, until
from tests.integration.worker_server.conftest import running_worker
from tests.trust import (
    HEALTH,
    Trusting,
    assert_callers_are_kept_to_their_methods,
    assert_strangers_are_refused,
    at,
    outcome,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@dataclass
class TlsInstallation:
    """Processes of one installation under TLS; the worker's server runs in the test's."""

    folder: Path
    authority: Authority
    gateway: GatewayProcess
    addresses: dict[str, str]  # by component

    def write(self, by: Authority, *trusted: Authority) -> None:
        """Renew the certificates of all components."""
        for component in COMPONENTS:
            write(self.folder / component, component, by, trusted)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def installation(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TlsInstallation]:
    folder = tmp_path_factory.mktemp("tls")
    authority = Authority.new(10 * DAY)
    for component in COMPONENTS:
        write(folder / component, component, authority)
    redis = KillableRedis(folder)
    redis.start()
    async with AsyncExitStack() as stack:
        stack.callback(redis.kill)
        coordinator = coordinator_process(redis.url_of("coordinator"), TLS_FOLDER=str(folder / "coordinator"))
        stack.enter_context(running(coordinator))
        of_router = {"TLS_FOLDER": str(folder / "router"), "COORDINATOR_ADDRESS": coordinator.address}
        router = stack.enter_context(running(router_process(redis.url_of("router"), **of_router)))
        worker = await stack.enter_async_context(running_worker(redis.url, tls_folder=str(folder / "worker")))
        of_gateway = {"TLS_FOLDER": str(folder / "gateway"), "REDIS_URL": redis.url}
        gateway = await stack.enter_async_context(gateway_process(router.address, folder / "log", **of_gateway))
        addresses = {"router": router.address, "coordinator": coordinator.address, "worker": worker.address}
        yield TlsInstallation(folder, authority, gateway, addresses)


async def test_certificates_change_under_load(installation: TlsInstallation) -> None:
    async with httpx.AsyncClient(base_url=installation.gateway.url, timeout=60) as http:
        statuses: list[int] = []

        async def load() -> None:
            while True:
                answer = await http.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
                statuses.append(answer.status_code)

        async def served() -> None:
            """Wait until requests were answered that came after this call."""
            n = len(statuses)
            await until(lambda: asyncio.sleep(0, len(statuses) > n + 2))

        async def accepted(by: Authority, trusted: Authority) -> bool:
            """Whether all servers accept a certificate of `by`, and show one of a CA that is trusted."""
            tls = Tls(write(installation.folder / "probe", "admin", by, [trusted]))
            errors = []
            for to, address in installation.addresses.items():
                async with open_channel(address, to=to, tls=tls) as channel:
                    errors.append(await outcome(channel, HEALTH))
            return not any(errors)

        loading = asyncio.create_task(load())
        await served()
        old, new = installation.authority, Authority.new(DAY)
        installation.write(old, old, new)
        await until(lambda: accepted(new, old), every_s=0.2)
        installation.write(new, old, new)
        await until(lambda: accepted(old, new), every_s=0.2)
        installation.write(new, new)
        await until(lambda: refused(accepted(old, new)), every_s=0.2)
        assert await accepted(new, new)
        await served()
        loading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loading
        assert set(statuses) == {200}, statuses
        installation.authority = new


async def refused(accepted: object) -> bool:
    return not await accepted  # type: ignore[misc]


async def test_every_caller_and_method(installation: TlsInstallation) -> None:
    services = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in ((routing_pb2, "Router"), (kv_pb2, "KvCoordinator"), (worker_pb2, "Worker"))
    ]
    methods = {f"{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods - CALLERS.keys() == set(), "without a row a method has no callers"
    servers = Trusting(
        installation.folder, installation.authority, DOMAIN, installation.addresses, apart=("router", "coordinator")
    )
    await assert_callers_are_kept_to_their_methods(servers)
    by_keda = Tls(write(installation.folder / "keda", "keda", installation.authority))
    async with open_channel(installation.addresses["router"], to="router", tls=by_keda) as channel:
        for method, caller in CALLERS.items():
            if at(method) == "router":
                error = await outcome(channel, method)
                assert error is not None
                expected = grpc.StatusCode.NOT_FOUND if "keda" in caller else grpc.StatusCode.PERMISSION_DENIED
                assert error.code() is expected, method
    await assert_strangers_are_refused(servers, installation.folder / "strangers")


async def test_a_folder_that_is_no_certificate_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority, other = Authority.new(DAY), Authority.new(DAY)
    folder = write(tmp_path / "one", "worker", authority)
    monkeypatch.setenv("RYZANSTEIN_TLS_FOLDER", str(folder))
    assert read_settings(ServiceSettings).open_tls() is not None
    for name, content, complaint in (
        ("tls.key", write(tmp_path / "two", "worker", other).joinpath("tls.key").read_bytes(), "is not the key of"),
        ("tls.key", b"nothing", "a private key in PEM format"),
        ("ca.crt", b"nothing", "certificates in PEM format"),
        ("tls.crt", authority.own.certificate, "spiffe://RELEASE.NAMESPACE/COMPONENT"),
        ("tls.crt", None, "cannot be read: No such file"),
    ):
        write(folder, "worker", authority)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        with pytest.raises(StartupError, match=f"RYZANSTEIN_TLS_FOLDER.*{name}.*{complaint}"):
            read_settings(ServiceSettings)
