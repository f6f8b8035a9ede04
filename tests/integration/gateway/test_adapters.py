"""Adapters are loaded once all workers of their model have checked them; all gateways know them then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from ryzanstein.v1 import worker_pb2

from services.common.adapters import RegisteredAdapter
from services.common.keys import RedisKeys
from services.gateway.tenants.keys import digest_of
from services.gateway.upstream.catalog import Catalog
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_gateway, running_stack
from tests.integration.gateway.redis_server import running_redis

KEYS = RedisKeys("default")
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "mine", "lora_path": "/adapters/mine"}


class Inspecting(Worker):
    """A worker that finds an adapter with this digest, or fails; it answers once `waits` requests are there."""

    digest, fails, waits = "d", "", 1

    async def InspectAdapter(self, request: worker_pb2.InspectAdapterRequest, context: Any) -> worker_pb2.Adapter:  # noqa: N802
        if self.fails:
            await context.abort(grpc.StatusCode.INTERNAL, self.fails)
        self.waits -= 1
        while self.waits > 0:  # noqa: ASYNC110  # the other request comes through another server
            await asyncio.sleep(0.01)
        return worker_pb2.Adapter(digest=self.digest)


@asynccontextmanager
async def adapted(folder: Path, *workers: Worker, **overrides: Any) -> AsyncIterator[tuple[GatewayStack, Any]]:
    with running_redis(folder) as redis:
        async with running_stack(workers, redis_url=redis.url, **overrides) as stack:
            yield stack, redis


async def refused(stack: GatewayStack, path: str = LOAD, key: str = "", **body: Any) -> tuple[int, str | None, str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    answer = await stack.http.post(path, json=BODY | body if path == LOAD else body, headers=headers)
    error = answer.json()["error"]
    return answer.status_code, error["param"], error["message"]


async def test_workers_have_to_agree(tmp_path: Path) -> None:
    one, two = Inspecting("w0"), Inspecting("w1")
    async with adapted(tmp_path, one, two, Inspecting("w2", model="another")) as (stack, redis):
        assert await refused(stack) == (
            400, "base_model_name", f"`base_model_name` must name one of another, {MODEL}.",
        )  # fmt: skip
        two.digest = "e"
        status, param, explanation = await refused(stack, base_model_name=MODEL)
        assert (status, param, "workers see different adapters in /adapters/mine" in explanation) == (
            400,
            "lora_path",
            True,
        )
        two.digest, two.fails = "d", "out of memory"
        status, _, explanation = await refused(stack, base_model_name=MODEL)
        assert (status, explanation) == (503, "Worker w1 did not check the adapter: out of memory")
        two.fails, one.waits = "", 2  # both requests are checked before either is written
        both = await asyncio.gather(*(stack.http.post(LOAD, json=BODY | {"base_model_name": MODEL}) for _ in range(2)))
        late = next(answer for answer in both if answer.status_code != 200)
        assert sorted(answer.status_code for answer in both) == [200, 400]
        assert late.json()["error"]["message"] == "`mine` was loaded at the same time."
        redis.process.kill()
        for path, body in ((LOAD, {"base_model_name": MODEL, "lora_name": "other"}), (UNLOAD, {"lora_name": "mine"})):
            assert (await refused(stack, path, **body))[0] == 503


async def test_change_by_another_gateway_is_followed_while_no_router_answers(tmp_path: Path) -> None:
    async with adapted(tmp_path, Inspecting("w0")) as (stack, redis):
        assert (await stack.http.post(LOAD, json=BODY)).status_code == 200
        await stack.router.stop()
        up = "ryzanstein_gateway_router_up"
        await eventually(lambda: stack.gateway.metrics.registry.get_sample_value(up) == 0)
        redis.client.hdel(KEYS.adapters, "mine")
        await eventually(lambda: not stack.gateway.catalog.knows("mine"))


async def test_new_adapter_is_known_at_another_gateway_at_once(tmp_path: Path) -> None:
    async with adapted(tmp_path, Inspecting("w0"), refresh_s=3600) as (stack, redis):
        settings = fast_settings(router_addresses=stack.router.address, redis_url=redis.url)
        async with running_gateway(settings) as second:
            await eventually(second.catalog.available)
            assert (await stack.http.post(LOAD, json=BODY)).status_code == 200
            url = f"http://127.0.0.1:{second.http.port}"
            async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http:
                assert (await http.get("/v1/models/mine")).json()["parent"] == MODEL
                for unknown in ("mine2", "nul%00", "x" * 1000):
                    assert (await http.get(f"/v1/models/{unknown}")).status_code == 404


async def test_adapters_of_a_later_version_hold_up_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with adapted(tmp_path, Inspecting("w0")) as (stack, redis):
        later = {"base": MODEL, "digest": "d", "source": "/later", "pinned": False, "of_a_later_version": 1}
        for name, text in (("wrong", "no adapter"), ("later", json.dumps(later))):
            redis.client.hset(KEYS.adapters, name, text)
        await eventually(lambda: "'wrong' of rz:default:adapters cannot be read" in caplog.text)
        redis.client.hset(KEYS.adapters, "next", RegisteredAdapter("next", MODEL, "d", "/next").to_json())
        await eventually(lambda: {"later", "next"} <= stack.gateway.catalog.adapters().keys())
        assert (await stack.http.get("/v1/models/wrong")).status_code == 404
        assert caplog.text.count("'wrong' of rz:default:adapters cannot be read") == 1


class SlowAdapters:
    """A list whose first reading ends last."""

    def __init__(self) -> None:
        self.last, self.readings = asyncio.Event(), 0

    async def read(self) -> dict[str, RegisteredAdapter]:
        self.readings += 1
        if self.readings > 1:
            return {}
        await self.last.wait()
        return {"mine": RegisteredAdapter("mine", MODEL, "d", "/mine")}

    async def find(self, name: str) -> None:
        """No adapter is found."""


async def test_unloaded_adapter_is_not_known_again_by_an_older_reading() -> None:
    adapters: Any = SlowAdapters()
    nothing: Any = None
    catalog = Catalog(nothing, nothing, adapters, nothing)
    readings = [asyncio.create_task(catalog.read_adapters()) for _ in range(2)]
    await asyncio.sleep(0.01)
    adapters.last.set()
    await asyncio.gather(*readings)
    assert catalog.adapters() == {}


async def test_openai_s_way_to_delete_a_model_unloads_an_adapter(tmp_path: Path) -> None:
    given = worker_pb2.ModelCard(adapters=[worker_pb2.Adapter(name="given", digest="d", source="/given")])
    async with adapted(tmp_path, Inspecting("w0", abilities=given)) as (stack, redis):
        assert (await stack.http.post(LOAD, json=BODY | {"lora_name": "a/b:c"})).status_code == 200
        assert list(stack.gateway.catalog.listed()) == [MODEL, "a/b:c", "given"], "the base first"
        deleted = await stack.http.delete("/v1/models/a/b:c")
        assert deleted.json() == {"id": "a/b:c", "object": "model", "deleted": True}
        for name, status, words in (
            ("a/b:c", 404, "does not exist"),
            (MODEL, 400, "is no adapter"),
            ("given", 400, "part of the workers' settings"),
        ):
            answer = await stack.http.delete(f"/v1/models/{name}")
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], words in error["message"]) == (status, "model", True), error
        assert list(stack.gateway.catalog.listed()) == [MODEL, "given"]
        await stack.http.post(LOAD, json=BODY)
        redis.process.kill()
        assert (await stack.http.delete("/v1/models/mine")).status_code == 503


@pytest.mark.parametrize(
    "text", ["", "two\nlines", "right\u202eleft", "nul\0", "bell\x07", "zero\u200bwidth", "x" * 4097]
)
async def test_names_and_paths_with_hidden_characters_are_rejected(text: str, tmp_path: Path) -> None:
    async with adapted(tmp_path, Inspecting("w0")) as (stack, _):
        for field in ("lora_name", "lora_path"):
            status, param, explanation = await refused(stack, **{field: text})
            assert (status, param) == (400, field)
            assert "printable characters, no control or format characters" in explanation
            assert explanation.isprintable()
        assert (await refused(stack, lora_name=" mine"))[:2] == (400, "lora_name")
        names = {"lora_name": "ft:smöl-model:ns/名前 (v2)", "lora_path": "/adapters/日本 語"}
        assert (await stack.http.post(LOAD, json=names)).status_code == 200


async def test_adapter_load_is_rejected_when_no_model_is_served(tmp_path: Path) -> None:
    async with adapted(tmp_path) as (stack, _):
        assert (await refused(stack))[::2] == (503, "no model is being served yet")


@pytest.mark.parametrize(("path", "body"), [(LOAD, {}), (UNLOAD, {"lora_name": "mine"})])
async def test_adapter_calls_require_an_administrator_key(tmp_path: Path, path: str, body: dict[str, str]) -> None:
    keys = json.dumps([{"key_sha256": digest_of("plain"), "name": "acme"}])
    async with adapted(tmp_path, Inspecting("w0"), tenancy=True, api_keys=keys) as (stack, _):
        status, _, explanation = await refused(stack, path, "plain", **body)
        assert (status, explanation) == (403, "This needs an administrator's key.")
        headers = {"authorization": "Bearer plain"}
        assert (await stack.http.delete("/v1/models/mine", headers=headers)).status_code == 403
