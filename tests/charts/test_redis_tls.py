"""The bundled Redis under `tls.mode`: what it listens on in each phase, and its certificate, which is renewed."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from services.common.ports import free_port
from services.common.redis_client import RedisAccess, open_redis
from services.common.tls.certificate import AUTHORITIES, CERTIFICATE, KEY, Identity
from services.common.tls.issuing import Authority
from tests.certificates import DAY, DOMAIN
from tests.charts.redis_scripts import running
from tests.charts.rendering import NAMESPACE, RELEASE, environment, render
from tests.integration.router.processes import until

HOST = f"{RELEASE}-redis.{NAMESPACE}.svc.cluster.local"
PLAIN, TLS = 6379, 6380


@pytest.mark.parametrize(
    ("tls", "url", "ports"),
    [
        ("{mode: 'off'}", f"redis://{HOST}:{PLAIN}/0", {PLAIN}),
        ("{phase: offer}", f"redis://{HOST}:{PLAIN}/0", {PLAIN, TLS}),
        ("{phase: use}", f"rediss://{HOST}:{TLS}/0", {PLAIN, TLS}),
        ("{}", f"rediss://{HOST}:{TLS}/0", {TLS}),
    ],
)
def test_neighbouring_phases_reach_redis(tls: str, url: str, ports: set[int]) -> None:
    rendered = render(inline=f"tls: {tls}")
    for pod in rendered.pods_of("gateway", "router", "coordinator", "worker"):
        variables = environment(pod.containers[0])
        assert variables["RYZANSTEIN_REDIS_URL"] == url
        trusted = variables.get("RYZANSTEIN_REDIS_CA_FILE")
        assert trusted == (f"{variables['RYZANSTEIN_TLS_FOLDER']}/ca.crt" if url.startswith("rediss") else None)
    (service,) = [each for each in rendered.of("Service") if each["metadata"]["name"] == f"{RELEASE}-redis"]
    assert {port["port"] for port in service["spec"]["ports"]} == ports
    (pod,) = rendered.pods_of("redis")
    assert {port["containerPort"] for port in pod.containers[0]["ports"]} == ports
    (config,) = [each for each in rendered.of("ConfigMap") if "start.sh" in each["data"]]
    listening = dict(line.split(maxsplit=1) for line in config["data"]["redis.conf"].splitlines() if "port" in line)
    assert {int(listening["port"]), int(listening.get("tls-port", 0))} - {0} == ports


def show(folder: Path, by: Authority) -> None:
    """Write the certificate of Redis, as a pod mounts it."""
    issued = by.issue(Identity(DOMAIN, "redis"), DAY, hosts=["localhost"])
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ((CERTIFICATE, issued.certificate), (KEY, issued.key), (AUTHORITIES, by.own.certificate)):
        (folder / name).write_bytes(content)


@pytest.mark.needs("redis 7")
async def test_its_certificate_is_verified_and_renewed_without_a_restart(tmp_path: Path) -> None:
    old, new = Authority.new(DAY), Authority.new(DAY)
    show(tmp_path / "etc/tls", old)
    password = tmp_path / "etc/redis/current/password"
    password.parent.mkdir(parents=True)
    password.write_text("secret")
    port, trusted = free_port(), tmp_path / "trusted.crt"
    trusted.write_bytes(old.own.certificate)
    access = RedisAccess(f"rediss://localhost:{port}/0", password="secret", ca_file=str(trusted))

    async def answers(one: RedisAccess) -> bool:
        async with open_redis(one, 5) as client:
            try:
                return bool(await client.ping())
            except (RedisError, OSError):
                return False

    with running(render(), tmp_path, {str(TLS): port}):
        await until(lambda: answers(access))
        assert not await answers(RedisAccess(f"redis://localhost:{port}/0", password="secret"))
        assert not await answers(RedisAccess(f"rediss://127.0.0.1:{port}/0", password="secret", ca_file=str(trusted)))
        async with open_redis(access, 5) as client:
            run_id = (await client.info("server"))["run_id"]
            show(tmp_path / "etc/tls", new)
            new_file = tmp_path / "new.crt"
            new_file.write_bytes(new.own.certificate)
            await until(lambda: answers(RedisAccess(access.url, password="secret", ca_file=str(new_file))))
            await client.connection_pool.disconnect()
            with pytest.raises(RedisConnectionError, match="certificate verify failed"):
                await client.ping()
            trusted.write_bytes(new.own.certificate)
            assert (await client.info("server"))["run_id"] == run_id
