"""Mutual TLS between services: who may call what, certificates that are renewed, and the way from plain text."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import pytest
import pytest_asyncio
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, routing_pb2, routing_pb2_grpc, worker_pb2
from tokenizers import Tokenizer

from services.common.lifecycle import StartupError, read_settings
from services.common.rpc import open_channel
from services.common.settings import ServiceSettings
from services.common.tls.access import CALLERS, COMPONENTS
from services.common.tls.credentials import Tls
from services.common.tls.issuing import Authority
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import open_model
from tests.certificates import DAY, DOMAIN, write
from tests.integration.gateway.process import GatewayProcess, gateway_process
from tests.integration.router.processes import KillableRedis, coordinator_process, router_process, running, until
from tests.integration.worker_server.processes import server_process
from tests.models import BUNDLED_MODEL
from tests.trust import (
    HEALTH,
    Trusting,
    assert_callers_are_kept_to_their_methods,
    assert_strangers_are_refused,
    at,
    outcome,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module")]
WORKERS = 3
SIMULATED = {"ENGINE": "simulated", "VIRTUAL_WORKERS": str(WORKERS), "ENGINE_ARGS": '{"speed": 20}', "DRAIN_S": "0.2"}


@dataclass
class TlsInstallation:
    """Processes of one installation under TLS; one of them has all workers, which are simulated."""

    folder: Path
    authority: Authority
    gateway: GatewayProcess
    addresses: dict[str, str]  # by component; the first worker's

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
        of_workers = {"TLS_FOLDER": str(folder / "worker"), **SIMULATED}
        workers = stack.enter_context(server_process(folder, redis.url_of("worker"), **of_workers))
        of_gateway = {"TLS_FOLDER": str(folder / "gateway"), "REDIS_URL": redis.url}
        gateway = await stack.enter_async_context(gateway_process(router.address, folder / "log", **of_gateway))
        addresses = {"router": router.address, "coordinator": coordinator.address, "worker": workers.address}
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


async def test_answers_of_virtual_workers_are_right_to_the_byte_and_strangers_are_refused_by_each(
    installation: TlsInstallation,
) -> None:
    model = await open_model(WorkerSettings(model=str(BUNDLED_MODEL), engine="simulated"), BUNDLED_MODEL)
    tokenizer = Tokenizer.from_buffer(model.model.tokenizer_json)
    sampling = worker_pb2.Sampling(max_tokens=24, stop_token_ids=model.model.eos_token_ids)
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 4000) for _ in range(80)] for _ in range(8 * WORKERS)]
    body = {"max_tokens": sampling.max_tokens, "temperature": 0}
    async with httpx.AsyncClient(base_url=installation.gateway.url, timeout=60) as http:
        answers = await asyncio.gather(
            *(http.post("/v1/completions", json=body | {"prompt": prompt}) for prompt in prompts)
        )
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = tokenizer.decode(model.simulation.language.continuation(prompt, sampling))
        assert answer.json()["choices"][0]["text"] == expected
    admin = Tls(installation.folder / "admin")
    async with open_channel(installation.addresses["coordinator"], to="coordinator", tls=admin) as channel:
        stats = kv_pb2_grpc.KvCoordinatorStub(channel).Stats

        async def known() -> bool:
            """Whether the coordinator has blocks of every worker."""
            workers = (await stats(kv_pb2.StatsRequest(), timeout=60)).workers
            return sum(worker.blocks > 0 for worker in workers) == WORKERS

        await until(known, every_s=0.2)
    async with open_channel(installation.addresses["router"], to="router", tls=admin) as channel:
        listed = await routing_pb2_grpc.RouterStub(channel).ListWorkers(routing_pb2.ListWorkersRequest(), timeout=60)
    assert len(listed.workers) == WORKERS
    await asyncio.gather(
        *(
            assert_strangers_are_refused(
                Trusting(installation.folder, installation.authority, DOMAIN, {"worker": view.address}),
                installation.folder / "strangers" / view.worker_id,
            )
            for view in listed.workers
        )
    )


async def test_every_caller_and_method(installation: TlsInstallation) -> None:
    services = [
        module.DESCRIPTOR.services_by_name[name]
        for module, name in ((routing_pb2, "Router"), (kv_pb2, "KvCoordinator"), (worker_pb2, "Worker"))
    ]
    methods = {f"{service.full_name}/{method.name}" for service in services for method in service.methods}
    assert methods - CALLERS.keys() == set(), "without a row a method has no callers"
    servers = Trusting(installation.folder, installation.authority, DOMAIN, installation.addresses)
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
