"""How services get into a Redis that asks who they are: users, passwords, TLS; and what they say when it fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote

import pytest
import redis.asyncio as redis
from redis.exceptions import RedisError

from services.common.keys import RedisKeys
from services.common.leases import Lease, LeaseKeeper
from services.common.ports import free_port
from services.common.redis_client import RedisAccess, open_redis
from services.common.redis_outage import AGAIN_S, RedisOutage
from services.common.tasks import end_tasks
from tests.integration.router.processes import Service, coordinator_process, router_process, until
from tests.models import BUNDLED_MODEL
from tests.programs import program

PASSWORD = "p@ss/w:r#d?%"  # nothing of it may be read as a part of a URL
LEASE = Lease("w", "incarnation", "host:1", "tiny", "serving")


class SecuredRedis:
    """Debian's server: with a user for services, and a port for TLS."""

    def __init__(self, folder: Path) -> None:
        self.port, self.tls_port, self.ca = free_port(), free_port(), folder / "ca.pem"
        for command in (
            "req -x509 -newkey rsa:2048 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ours",
            "req -newkey rsa:2048 -nodes -keyout key.pem -out request.pem -subj /CN=redis",
        ):
            subprocess.run([program("openssl"), *command.split()], cwd=folder, check=True, capture_output=True)
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
        sign = "x509 -req -in request.pem -CA ca.pem -CAkey ca.key -out cert.pem -days 2 -extfile names"
        subprocess.run([program("openssl"), *sign.split()], cwd=folder, check=True, capture_output=True)
        options = f"--port {self.port} --tls-port {self.tls_port} --tls-cert-file cert.pem --tls-key-file key.pem"
        options += " --tls-ca-cert-file ca.pem --tls-auth-clients no --save "
        user = "--requirepass admin --user services on ~* &* +@all -config"
        self.process = subprocess.Popen(
            [program("redis 7"), *options.split(), "", *user.split(), f">{PASSWORD}"],
            cwd=folder,
            stdout=subprocess.DEVNULL,
        )

    def access(self, **fields: str) -> RedisAccess:
        return RedisAccess(**({"url": f"redis://127.0.0.1:{self.port}/0"} | fields))

    async def admin(self, *command: str) -> None:
        async with open_redis(self.access(password="admin"), 5) as client:
            await client.execute_command(*command)  # type: ignore[no-untyped-call]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredRedis]:
    running = SecuredRedis(tmp_path_factory.mktemp("redis"))

    async def up() -> bool:
        with contextlib.suppress(RedisError):
            await running.admin("PING")
            return True
        return False

    asyncio.run(until(up))
    yield running
    running.process.kill()
    running.process.wait()


async def ping(access: RedisAccess) -> bool:
    async with open_redis(access, 10) as client:
        return bool(await client.ping())


async def test_user_and_password_as_settings_or_encoded_in_the_url(server: SecuredRedis, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    encoded = quote(PASSWORD, safe="")
    assert await ping(server.access(username="services", password=PASSWORD))
    assert await ping(server.access(username="services", password_file=str(file)))
    assert await ping(server.access(url=f"redis://services:{encoded}@127.0.0.1:{server.port}/0"))
    assert await ping(server.access(url=f"redis://services@127.0.0.1:{server.port}/0", password=PASSWORD))
    tls = f"rediss://127.0.0.1:{server.tls_port}"
    assert await ping(server.access(url=tls, username="services", password=PASSWORD, ca_file=str(server.ca)))


async def test_a_password_that_changes_in_its_file_works_without_a_restart(
    server: SecuredRedis, tmp_path: Path
) -> None:
    file = tmp_path / "password"
    file.write_text("old")
    await server.admin("ACL", "SETUSER", "rotated", "on", "+@all", "~*", "&*", ">old")
    access = server.access(username="rotated", password_file=str(file))
    async with open_redis(access, 10) as client:
        keeper = LeaseKeeper(client, RedisKeys("test"), access, lambda: LEASE)
        task = asyncio.create_task(keeper.run())
        try:
            await asyncio.wait_for(keeper.written.wait(), 60)
            await server.admin("ACL", "SETUSER", "rotated", "<old", ">new")
            await server.admin("CLIENT", "KILL", "USER", "rotated")
            file.write_text("new")
            keeper.written.clear()
            await asyncio.wait_for(keeper.written.wait(), 60)
        finally:
            await end_tasks([task])


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({}, "authentication", "wants a password: set RYZANSTEIN_REDIS_PASSWORD"),
        ({"password": "wrong secret"}, "authentication", "refuses the password in RYZANSTEIN_REDIS_PASSWORD for the"),
        ({"username": "who", "password": "secret"}, "authentication", "for the user 'who'"),
        (
            {"url": "redis://:secret@127.0.0.1:{port}"},
            "authentication",
            "in RYZANSTEIN_REDIS_URL for the user",
        ),
        ({"password_file": "/nowhere"}, "password file", "RYZANSTEIN_REDIS_PASSWORD_FILE cannot be read"),
        ({"username": "services", "password": PASSWORD}, "permission", "RYZANSTEIN_REDIS_USERNAME"),
        ({"url": "rediss://127.0.0.1:{tls_port}", "password": "admin"}, "tls", "RYZANSTEIN_REDIS_CA_FILE"),
        ({"url": "rediss://localhost:{tls_port}", "password": "admin", "ca_file": "{ca}"}, "tls", "the host that it"),
        ({"url": "rediss://127.0.0.1:{port}", "password": "admin"}, "time-out|tls|closed", "does it speak TLS"),
        ({"url": "redis://127.0.0.1:{tls_port}", "password": "admin"}, "closed", "must start with rediss://"),
        ({"url": "redis://127.0.0.1:1"}, "ConnectionError", "127.0.0.1:1"),
    ],
)
async def test_connection_error_names_the_variable(
    server: SecuredRedis, caplog: pytest.LogCaptureFixture, fields: dict[str, str], kind: str, words: str
) -> None:
    places = {"port": server.port, "tls_port": server.tls_port, "ca": server.ca}
    access = server.access(**{k: v.format(**places) if k != "password" else v for k, v in fields.items()})
    async with open_redis(access, 5.0) as client:
        with pytest.raises((RedisError, OSError)) as caught:
            await client.execute_command("CONFIG", "GET", "port")  # type: ignore[no-untyped-call]
    outage = RedisOutage(logging.getLogger("outage"), access, "nothing works")
    assert outage.failed(caught.value).kind in kind.split("|")
    (line,) = caplog.messages
    assert line.startswith("Redis is away, nothing works: ")
    assert words in line
    assert not any(part in line for part in ("secret", "p@ss", "w:r", "admin"))


def test_each_kind_is_logged_once_and_again_every_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr("services.common.redis_outage.time.monotonic", lambda: now[0])
    caplog.set_level("INFO")
    outage = RedisOutage(logging.getLogger("outage"), RedisAccess("redis://host"), "nothing works")
    refused, late = redis.ConnectionError("refused"), redis.TimeoutError()
    for error in (refused, refused, late, refused, late):
        outage.failed(error)
    assert len(caplog.messages) == 2
    now[0] += AGAIN_S
    outage.failed(late)
    assert len(caplog.messages) == 3
    outage.ended()
    outage.ended()
    assert caplog.messages[3:] == ["Redis is back"]


def http_get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return int(answer.status), answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def http_status(port: int, path: str) -> int:
    return http_get(port, path)[0]


WRONG = {"REDIS_USERNAME": "services", "REDIS_PASSWORD": "wrong"}


@pytest.mark.parametrize(
    ("module", "away"), [("worker", False), ("router", True), ("kv_coordinator", True), ("gateway", False)]
)
async def test_without_redis_every_service_runs_on_and_says_why(
    server: SecuredRedis, tmp_path: Path, module: str, away: bool
) -> None:
    """Not a crash loop, and no silence: the log once, readiness as long as it lasts; a gateway serves without."""
    port, log = free_port(), tmp_path / "log"
    expected = "127.0.0.1:1" if away else "refuses the password in RYZANSTEIN_REDIS_PASSWORD for the user 'services'"
    url = "redis://127.0.0.1:1" if away else f"redis://127.0.0.1:{server.port}/0"
    fields = {"REDIS_URL": url, "METRICS_PORT": str(port), **({} if away else WRONG)}
    fields |= {"MODEL": str(BUNDLED_MODEL), "ROUTER_ADDRESSES": "127.0.0.1:1"}
    fields |= {f"{name}_PORT": str(free_port()) for name in ("GATEWAY", "ROUTER", "COORDINATOR")}
    environment = os.environ | {f"RYZANSTEIN_{name}": value for name, value in fields.items()}
    with log.open("w") as output:
        service = subprocess.Popen(  # noqa: ASYNC220  # starting takes no time
            [sys.executable, "-m", f"services.{module}"], stdout=output, env=environment
        )

    def warnings() -> list[str]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line["message"] for line in lines if line["message"].startswith("Redis is away")]

    async def told() -> bool:
        assert service.poll() is None, log.read_text()
        try:
            status, why = await asyncio.to_thread(http_get, port, "/readyz")
        except OSError:
            return False
        return status == 503 and bool(warnings()) and (expected in why or module == "gateway")

    try:
        await until(told, 240)
        assert expected in warnings()[0]
        assert len(warnings()) == len(set(warnings())), "each once"
        assert http_status(port, "/livez") == 200
        if module == "gateway":
            assert "ryzanstein_gateway_redis_up 0.0" in http_get(port, "/metrics")[1]
        assert service.poll() is None
        service.terminate()
        assert service.wait(60) == 0
    finally:
        service.kill()
        service.wait()


async def test_services_are_unready_until_the_redis_password_is_right(server: SecuredRedis, tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("wrong")
    environment = {"REDIS_USERNAME": "services", "REDIS_PASSWORD_FILE": str(file)}
    ports = [free_port(), free_port()]
    url = f"redis://127.0.0.1:{server.port}/0"
    started: list[Service] = []
    try:
        for start, port in zip((router_process, coordinator_process), ports, strict=True):
            started.append(await asyncio.to_thread(start, url, METRICS_PORT=str(port), **environment))
        assert [http_status(port, "/readyz") for port in ports] == [503, 503]
        assert [http_status(port, "/livez") for port in ports] == [200, 200]

        async def warned(service: Service) -> bool:
            warnings = [line["message"] for line in service.logs() if line["level"] == "warning"]
            assert len(set(warnings)) == len(warnings), "one for each consequence"
            return bool(warnings) and all("RYZANSTEIN_REDIS_PASSWORD_FILE" in warning for warning in warnings)

        for service in started:
            await until(partial(warned, service))
        file.write_text(PASSWORD)

        async def ready() -> bool:
            return [http_status(port, "/readyz") for port in ports] == [200, 200]

        await until(ready)
        file.write_text("wrong")
        await server.admin("CLIENT", "KILL", "USER", "services")
        await asyncio.sleep(1.5)
        assert await ready(), "sticky: what serves is not taken away because Redis is"
        assert json.dumps(started[0].logs()).count(PASSWORD) == 0
    finally:
        for service in started:
            service.end()
