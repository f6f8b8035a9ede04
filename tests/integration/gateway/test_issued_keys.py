"""Keys that `ryzanstein keys` issues, over the administration port, on two gateways with one Redis."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from services.cli.main import app
from services.common.lifecycle import StartupError
from services.common.ports import free_port
from services.gateway.tenants import keys
from services.gateway.tenants.issued import IssuedKey, PresentedKey, SecretHash, new_secret
from services.gateway.tenants.keys import KeyDirectory, digest_of, read_keys
from services.gateway.tenants.tenant import Tenant
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, fast_settings, running_gateway, running_stack
from tests.integration.gateway.redis_server import RedisServer, running_redis

TOKEN = "an administrator's token"


@dataclass
class KeyInstallation:
    first: GatewayStack
    second: str  # URL of another gateway
    admin: str
    redis: RedisServer

    async def keys(self, *arguments: str, token: str = TOKEN) -> str:
        """The output of `ryzanstein keys`."""
        command = ["keys", *arguments, "--url", self.admin]
        ran = await asyncio.to_thread(CliRunner().invoke, app, command, env={"RYZANSTEIN_ADMIN_TOKEN": token})
        assert ran.exit_code == 0, ran.output
        return ran.output.strip()

    async def created(self, tenant: str, *options: str) -> tuple[str, PresentedKey]:
        """A new key of a tenant, and its parts."""
        key = await self.keys("create", tenant, *options)
        parts = PresentedKey.parse(key)
        assert parts is not None
        return key, parts

    async def status(self, key: str, url: str = "", **fields: Any) -> int:
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 2, **fields}
        headers = {"authorization": f"Bearer {key}"}
        answer = await self.first.http.post(f"{url or self.first.url}/v1/completions", json=body, headers=headers)
        return answer.status_code

    async def statuses(self, key: str) -> list[int]:
        """Of both gateways, that of the administration first."""
        return [await self.status(key, url) for url in (self.first.url, self.second)]

    async def refused_everywhere_within(self, seconds: float, key: str) -> bool:
        async with asyncio.timeout(seconds):
            for url in (self.first.url, self.second):
                while await self.status(key, url) != 401:  # noqa: ASYNC110  # gateways do not announce it
                    await asyncio.sleep(0.05)
        return True


@asynccontextmanager
async def installation(tmp_path: Path, **overrides: Any) -> AsyncIterator[KeyInstallation]:
    fixed = [{"key_sha256": digest_of("plain"), "name": "plain"}]
    with running_redis(tmp_path) as redis:
        settings = {"tenancy": True, "redis_url": redis.url, "api_keys": json.dumps(fixed)}
        port = free_port()
        administration = {"admin_port": port, "admin_token": TOKEN}
        async with running_stack([Worker("w0")], **(settings | administration | overrides)) as stack:
            other = fast_settings(router_addresses=stack.router.address, **settings)
            async with running_gateway(other) as second:
                url = f"http://127.0.0.1:{second.http.port}"
                yield KeyInstallation(stack, url, f"http://127.0.0.1:{port}", redis)


async def test_a_key_is_issued_limited_rotated_and_revoked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "services.gateway.audit")
    async with installation(tmp_path) as there:
        key, presented = await there.created("acme", "--requests-per-minute", "100")
        assert await there.statuses(key) == [200, 200]
        assert there.first.workers[0].submits[-1].tenant == "acme"
        wrong = PresentedKey(presented.id, new_secret()[0])
        assert [await there.status(str(wrong)), await there.status(f"rz-{'0' * 12}-{presented.secret}")] == [401, 401]

        (listed,) = json.loads(await there.keys("list", "--json"))
        assert (listed["prefix"], listed["requests_per_minute"]) == (f"rz-{presented.id}-", 100)
        assert presented.id in await there.keys("list")
        stored = there.redis.client.hget("rz:default:issued-keys", presented.id)
        for text in (json.dumps(listed), stored.decode(), caplog.text):
            assert presented.secret not in text

        assert "budget_per_month" not in json.loads(stored), "gateways that know no budgets read the key"
        await there.keys("limit", presented.id, "--budget-per-month", "12.5")
        assert "budget per month 12.5" in await there.keys("list")

        endless = json.loads(stored)
        endless["until"] = 1e30  # no date
        there.redis.client.hset("rz:default:issued-keys", presented.id, json.dumps(endless))
        assert "9999-12-31" in await there.keys("list")

        await there.keys("limit", presented.id, "--model", "another")
        later = datetime.now(UTC) + timedelta(hours=2)
        closed = await there.keys(
            "create", "night", "--hours", f"{later:%H:%M}-{later + timedelta(hours=1):%H:%M}", "--timezone", "UTC",
            "--days", "mon,tue, wed,thu,fri,sat,sun", "--expires-in", "30d", "--max-concurrent", "3", "--model", MODEL,
        )  # fmt: skip
        assert await there.status(closed) == 403
        (limited,) = (key for key in json.loads(await there.keys("list", "--json")) if key["id"] == presented.id)
        assert limited["requests_per_minute"] == 100, "what is not named stays"
        await there.keys("limit", presented.id, "--model", MODEL)

        renewed = await there.keys("rotate", presented.id, "--overlap", "1h")
        assert await there.status(key) == 200, "both are valid for an hour"
        last = await there.keys("rotate", presented.id, "--overlap", "0s")
        assert await there.refused_everywhere_within(60, key)
        assert await there.refused_everywhere_within(60, renewed)
        assert await there.status(last) == 200
        await there.keys("revoke", presented.id)
        assert await there.refused_everywhere_within(60, last)
        with pytest.raises(AssertionError, match=f"There is no key {presented.id}"):
            await there.keys("revoke", presented.id)

    assert [(record.message, record.by) for record in caplog.records if record.name.endswith("audit")] == [
        (f"API key {what}", "token")
        for what in ("created", "limited", "limited", "created", "limited", "rotated", "rotated", "revoked")
    ]


async def test_change_of_a_key_holds_at_its_gateway_at_once_and_a_new_secret_at_every_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that gets 401 does not try again."""
    monkeypatch.setattr(keys, "_KNOWN_S", 3600.0)
    async with installation(tmp_path) as there:
        first, presented = await there.created("acme")
        assert await there.statuses(first) == [200, 200]
        await there.keys("limit", presented.id, "--model", "another")
        assert await there.status(first) == 403
        await there.keys("limit", presented.id, "--model", MODEL)
        assert await there.status(first) == 200
        second = await there.keys("rotate", presented.id, "--overlap", "0s")
        assert await there.statuses(second) == [200, 200]
        assert await there.statuses(first) == [401, 401]
        await there.keys("revoke", presented.id)
        assert await there.status(second) == 401


async def test_record_of_a_key_that_is_read_during_a_change_is_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_KNOWN_S", 3600.0)
    async with installation(tmp_path) as there:
        key, presented = await there.created("acme")
        began, may_end, read = asyncio.Event(), asyncio.Event(), KeyDirectory._read  # noqa: SLF001

        async def read_slowly(directory: KeyDirectory, credential: str) -> Tenant | None:
            tenant = await read(directory, credential)
            began.set()
            await may_end.wait()
            return tenant

        monkeypatch.setattr(KeyDirectory, "_read", read_slowly)
        asking = asyncio.create_task(there.status(key))
        await began.wait()
        await there.keys("limit", presented.id, "--model", "another")
        may_end.set()
        await asking
        assert await there.status(key) == 403


async def test_wrong_secret_does_not_shut_a_key_out_while_redis_is_away(tmp_path: Path) -> None:
    async with installation(tmp_path) as there:
        key, presented = await there.created("acme")
        assert await there.status(key) == 200
        there.redis.process.kill()
        wrong = str(PresentedKey(presented.id, new_secret()[0]))
        assert [await there.status(each) for each in (wrong, key)] == [401, 200]


WRONG_LIMITS: list[tuple[str, Any]] = [
    *((name, n) for name in ("requests_per_minute", "tokens_per_month", "max_concurrent") for n in (-1, 10**20)),
    *(
        ("budget_per_month", -0.5),
        ("budget_per_month", 1e10),
        ("priority", 101),
        ("weight", -1),
        ("weight", 1001),
        ("models", [""]),
        ("models", ["a\nb"]),
    ),
]


async def test_limits_beyond_their_ranges_are_rejected() -> None:
    """A key with one would fail at every request, and one with no date at its end would end `keys list`."""
    port = free_port()
    async with running_stack([], admin_port=port, admin_token=TOKEN) as stack:
        for field, value in (*WRONG_LIMITS, ("expires_in_s", 1e30)):
            body, headers = {"name": "acme", field: value}, {"authorization": f"Bearer {TOKEN}"}
            answer = await stack.http.post(f"http://127.0.0.1:{port}/admin/keys", json=body, headers=headers)
            assert answer.status_code == 400, answer.text
            assert (answer.json()["error"]["param"] or "").split("[")[0] in (field, ""), answer.text
    for field, value in WRONG_LIMITS:
        with pytest.raises(StartupError, match="API keys: "):
            read_keys("", json.dumps([{"key_sha256": digest_of("k"), "name": "acme", field: value}]))


async def test_only_administrators_administrate(tmp_path: Path) -> None:
    async with installation(tmp_path) as there:
        http = there.first.http
        for sent, status in (
            ({}, 401),
            ({"authorization": "Bearer wrong"}, 401),
            ({"authorization": "Bearer plain"}, 403),
        ):
            for method, path in ("GET", ""), ("POST", ""), ("DELETE", "/a"), ("PATCH", "/a"), ("POST", "/a/rotate"):
                answer = await http.request(method, f"{there.admin}/admin/keys{path}", headers=sent)
                assert answer.status_code == status, (method, path)
                assert answer.json()["error"]["message"]
        key = await there.keys("create", "ops", "--admin")
        assert json.loads(await there.keys("list", "--json", token=key))[0]["admin"]
        public = await http.get("/admin/keys", headers={"authorization": f"Bearer {key}"})
        assert public.status_code == 404, "the public port does not serve it"
        headers = {"authorization": f"Bearer {TOKEN}"}
        for body, param in (
            ({"name": "a", "requests_per_minute": "many"}, "requests_per_minute"),
            ({"name": "a", "hours": {"start": "25:00", "end": "08:00"}}, "hours.start"),
            ({"name": "a", "colour": "red"}, "colour"),
            ({"name": "no spaces"}, "name"),
            ({}, "name"),
        ):
            answer = await http.post(f"{there.admin}/admin/keys", json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        (known,) = json.loads(await there.keys("list", "--json"))
        for path, body, status, code in (
            (known["id"], b"{", 400, "invalid_json"),
            (known["id"], b'{"name": "another"}', 400, "invalid_value"),
            (known["id"], b" " * 65_537, 413, "body_too_large"),
            ("0" * 12, b"{}", 404, "key_not_found"),
        ):
            answer = await http.patch(f"{there.admin}/admin/keys/{path}", content=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (status, code), answer.text
        answer = await http.post(f"{there.admin}/admin/keys/{'0' * 12}/rotate", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "key_not_found")


async def test_no_change_of_a_key_is_lost(tmp_path: Path) -> None:
    async with installation(tmp_path) as there:
        key = PresentedKey.parse(await there.keys("create", "acme"))
        assert key is not None
        rotate = f"{there.admin}/admin/keys/{key.id}/rotate"
        headers = {"authorization": f"Bearer {TOKEN}"}
        answers = await asyncio.gather(*(there.first.http.post(rotate, headers=headers) for _ in range(30)))
        refused = {answer.json()["error"]["code"] for answer in answers if answer.status_code != 200}
        assert refused <= {"conflict"}, "more at once than can be tried again"
        made = [answer.json()["key"] for answer in answers if answer.status_code == 200]
        (listed,) = json.loads(await there.keys("list", "--json"))
        assert listed["secrets"] == 1 + len(made)
        assert [await there.status(each) for each in made] == [200] * len(made)


async def test_without_tenancy_the_token_alone_administrates(tmp_path: Path) -> None:
    port = free_port()
    with running_redis(tmp_path) as redis:
        async with running_stack([], redis_url=redis.url, admin_port=port, admin_token=TOKEN) as stack:
            for key, status in (("wrong", 401), (TOKEN, 200)):
                headers = {"authorization": f"Bearer {key}"}
                answer = await stack.http.get(f"http://127.0.0.1:{port}/admin/keys", headers=headers)
                assert answer.status_code == status, answer.text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("[{}]", "key_sha256"), ('[{"id": "a"}]', r"\$.id"), ("{", "array"), ('[{"key_sha256": "x"}]', r"\$.key_sha256")],
)
def test_keys_that_can_not_be_read_are_an_error_of_the_start(text: str, expected: str) -> None:
    with pytest.raises(StartupError, match=f"API keys: .*{expected}"):
        read_keys("", text)


async def test_an_issued_key_may_be_mounted_as_a_file(tmp_path: Path) -> None:
    secret, hashed = new_secret()
    issued = IssuedKey(id="0" * 12, secrets=(hashed,), created_at=0, name="mounted")
    (tmp_path / "keys.json").write_bytes(b"[" + msgspec.json.encode(issued) + b"]")
    async with installation(tmp_path, api_keys="", api_keys_file=str(tmp_path / "keys.json")) as there:
        assert await there.status(str(PresentedKey(issued.id, secret))) == 200
        assert there.first.workers[0].submits[-1].tenant == "mounted"


def test_a_secret_ends_at_its_time() -> None:
    secret, hashed = new_secret()
    limited = SecretHash(salt=hashed.salt, sha256=hashed.sha256, until=100.0)
    assert limited.opens(secret, 99.0)
    assert not limited.opens(secret, 100.0)
    assert not hashed.opens(secret[:-1] + ("a" if secret[-1] != "a" else "b"), time.time())
