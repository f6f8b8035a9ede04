"""Keys, limits, quotas and the response cache, against a real Redis that comes and goes."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import grpc.aio
import pytest
import websockets
from ryzanstein.v1 import inference_pb2, inference_pb2_grpc

from services.common.ports import free_port
from services.common.rpc import open_channel
from services.gateway.main import Gateway, running_gateway
from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_stack
from tests.integration.gateway.redis_server import RedisServer

PROMPT = "The quick brown fox"
COMPLETIONS = "/v1/completions"
KEY = {"authorization": "Bearer secret"}
BODIES = {"/v1/chat/completions": ("messages",), "/v1/responses": ("input",), "/v1/embeddings": ("input",)}


def entry(key: str, **fields: Any) -> dict[str, Any]:
    return {"key_sha256": digest_of(key), "name": "acme", **fields}


@asynccontextmanager
async def tenancy(server: RedisServer, *entries: dict[str, Any], **overrides: Any) -> AsyncIterator[GatewayStack]:
    settings = {"tenancy": True, "redis_url": server.url, "api_keys": json.dumps(entries)}
    async with running_stack([Worker("w0")], **(settings | overrides)) as stack:
        yield stack


async def ask(stack: GatewayStack, key: str = "secret", path: str = COMPLETIONS, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": 5, **fields}
    return await stack.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})


async def test_keys_are_needed_everywhere(server: RedisServer) -> None:
    async with tenancy(server, entry("secret")) as stack:
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/embeddings", "/v1/score", "/tokenize"):
            answer = await stack.http.post(path, json={"prompt": PROMPT})
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            keyed = await stack.http.post(path, json={}, headers={"x-api-key": "secret"})
            assert keyed.status_code == 400, "the header of Anthropic's clients is as good"
        assert (await stack.http.get("/v1/models")).status_code == 401
        assert (await stack.http.get("/v1/models", headers={"x-api-key": "secret"})).status_code == 200
        assert (await ask(stack, "wrong")).status_code == 401
        assert (await ask(stack)).status_code == 200
        assert (await stack.http.get("/health")).status_code == 200
        workers = await stack.http.get("/admin/workers", headers={"authorization": "Bearer secret"})
        assert workers.status_code == 403


async def test_texts_that_are_compared_count(server: RedisServer) -> None:
    async with tenancy(server, entry("secret", tokens_per_minute=60)) as stack:
        body = {"query": "q", "documents": ["one", "two"]}
        answer = await stack.http.post("/v1/rerank", json=body, headers={"authorization": "Bearer secret"})
        left = 60 - answer.json()["usage"]["total_tokens"]
        assert 0 < left < 60
        assert answer.headers["x-ratelimit-remaining-tokens"] == str(left)
        body["documents"] = ["too many words for what is left of this minute"] * 3
        more = await stack.http.post("/v1/rerank", json=body, headers={"authorization": "Bearer secret"})
        assert (more.status_code, more.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert more.headers["x-ratelimit-remaining-tokens"] == str(left - 1), (
            "one is reserved before the texts are read"
        )


async def test_anthropics_client_has_a_key_and_limits(server: RedisServer) -> None:
    hello: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
    async with (
        tenancy(server, entry("secret", requests_per_minute=2)) as stack,
        anthropic.AsyncAnthropic(base_url=stack.url, api_key="secret", max_retries=0) as client,
    ):
        with pytest.raises(anthropic.AuthenticationError) as unknown:
            await client.with_options(api_key="wrong").messages.create(**hello, max_tokens=3)
        assert (unknown.value.type, unknown.value.error_code) == ("authentication_error", "invalid_api_key")
        answer = await client.messages.with_raw_response.create(**hello, max_tokens=3)
        assert stack.workers[0].submits[-1].tenant == "acme"
        assert answer.headers["x-ratelimit-remaining-requests"] == "1"
        assert answer.headers["request-id"] == answer.headers["x-request-id"]
        assert (await client.messages.count_tokens(**hello)).input_tokens > 0
        assert [(model.id, model.type) async for model in client.models.list()] == [(MODEL, "model")]
        assert (await client.models.retrieve(MODEL)).created_at.year >= 2023
        for path in ("/v1/models/nope", "/v1/messages/batches", "/v1/messages/batches/a"):
            with pytest.raises(anthropic.NotFoundError) as missing:
                await client.get(path, cast_to=object)
            assert missing.value.type == "not_found_error"
            assert missing.value.body["request_id"] == missing.value.response.headers["request-id"]
        with pytest.raises(anthropic.RateLimitError) as limited:
            await client.messages.create(**hello, max_tokens=3)
        assert (limited.value.type, limited.value.error_code) == ("rate_limit_error", "rate_limit_exceeded")
        assert limited.value.response.headers["retry-after"]


async def test_keys_may_come_from_a_file_and_from_redis(server: RedisServer, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps([entry("from-file", admin=True)]), encoding="utf-8-sig")  # with a byte-order mark
    server.client.set(f"rz:default:key:{digest_of('from-redis')}", json.dumps({"name": "other"}))
    async with tenancy(server, api_keys_file=str(path)) as stack:
        assert (await ask(stack, "from-file")).status_code == 200
        assert stack.workers[0].submits[-1].tenant == "acme"
        assert (await ask(stack, "from-redis")).status_code == 200
        assert stack.workers[0].submits[-1].tenant == "other"
        assert stack.workers[0].submits[-1].cache_salt == "other", "tenants do not share cached prefixes"
        workers = await stack.http.get("/admin/workers", headers={"authorization": "Bearer from-file"})
        assert [w["worker_id"] for w in workers.json()["workers"]] == ["w0"]
        await stack.router.stop()
        workers = await stack.http.get("/admin/workers", headers={"authorization": "Bearer from-file"})
        assert workers.status_code == 503, "the loads of an earlier list are not shown as current ones"
        server.client.delete(f"rz:default:key:{digest_of('from-redis')}")
        await asyncio.sleep(1.1)  # as long as a gateway may remember
        assert (await ask(stack, "from-redis")).status_code == 401


async def test_requests_per_minute(server: RedisServer) -> None:
    async with tenancy(server, entry("secret", requests_per_minute=3)) as stack:
        remaining = []
        for _ in range(3):
            answer = await ask(stack)
            assert answer.status_code == 200
            assert answer.headers["x-ratelimit-limit-requests"] == "3"
            remaining.append(answer.headers["x-ratelimit-remaining-requests"])
        assert remaining == ["2", "1", "0"]
        refused = await ask(stack)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert refused.json()["error"]["type"] == "requests"
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"


async def test_tokens_are_reserved_and_settled(server: RedisServer) -> None:
    async with tenancy(server, entry("secret", tokens_per_minute=100)) as stack:
        stack.workers[0].end_at = 2
        for _ in range(3):  # 80 are reserved each time, few are used
            assert (await ask(stack, max_tokens=80)).status_code == 200
        refused = await ask(stack, max_tokens=90)
        assert refused.status_code == 429
        assert refused.json()["error"]["type"] == "tokens"
        assert (await ask(stack, max_tokens=10)).status_code == 200, "a refused request uses nothing up"


async def test_the_monthly_quota(server: RedisServer) -> None:
    async with tenancy(server, entry("secret", tokens_per_month=60)) as stack:
        assert (await ask(stack, max_tokens=20)).status_code == 200
        await eventually(lambda: server.sum_of("rz:default:quota:acme:*"))  # settled after its answer
        (key,) = server.client.keys("rz:default:quota:acme:*")
        assert int(server.client.get(key)) > 20
        assert 39 * 86400 < server.client.ttl(key) <= 40 * 86400
        server.client.set(key, 55)
        refused = await ask(stack)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "insufficient_quota"
        assert int(server.client.get(key)) == 55, "a refused request uses nothing up"


@pytest.mark.parametrize("status", [429, 402])
async def test_monthly_budget_is_spent_by_costs_and_refuses(server: RedisServer, status: int) -> None:
    port = free_port()
    fields = {"prices": '{"*": {"input": 1000, "output": 10000}}', "quota_status": status, "grpc_port": port}
    async with (
        tenancy(server, entry("secret", budget_per_month=0.1), entry("rich", name="other"), **fields) as stack,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        usage = (await ask(stack, max_tokens=10)).json()["usage"]
        spent = usage["prompt_tokens"] / 1000 + usage["completion_tokens"] / 100
        (key,) = server.client.keys("rz:default:spent:acme:*")
        assert int(server.client.get(key)) == round(spent * 1e9)
        refused = await ask(stack)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, "insufficient_quota")
        assert refused.json()["error"]["message"] == f"The monthly budget of 0.1 is used up ({spent:.12g} spent)."
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
        messages = await stack.http.post("/v1/messages", json=body, headers=KEY)
        kind = {429: "rate_limit_error", 402: "billing_error"}[status]
        assert (messages.status_code, messages.json()["error"]["type"]) == (status, kind)
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as call:
            await stub.Generate(inference_pb2.GenerateRequest(prompt="a"), metadata=[*KEY.items()]).read()
        assert call.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await ask(stack, "rich")).status_code == 200
        server.client.set(key, 0)
        assert (await ask(stack)).status_code == 200, "another month has another budget"


async def test_concurrency_and_priority(server: RedisServer) -> None:
    async with tenancy(server, entry("secret", max_concurrent=2, priority=5, weight=3)) as stack:
        steps = stack.workers[0].steps = asyncio.Semaphore(0)
        sent = [asyncio.create_task(ask(stack, priority=-10)) for _ in range(4)]
        await eventually(lambda: sum(task.done() for task in sent) == 2)
        for _ in range(2 * 5 + 5):
            steps.release()
        answers = await asyncio.gather(*sent)
        assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429]
        submit = stack.workers[0].submits[-1]
        assert (submit.priority, submit.weight) == (5, 3), "no request gets a better priority than the tenant's"
        assert (await ask(stack)).status_code == 200, "the slots are free again"


async def test_models_may_be_restricted(server: RedisServer) -> None:
    allowed = "This key may not use the model `{}`. Models that it may use: `another`."
    async with tenancy(server, entry("secret", models=["another"])) as stack:
        for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/tokenize"):
            for model in (MODEL, "nope"):
                body = {"model": model, "prompt": "a", "input": "a", "messages": [{"role": "user", "content": "a"}]}
                fields = BODIES.get(path, ("prompt",))
                answer = await stack.http.post(
                    path, json={name: body[name] for name in ("model", *fields)}, headers=KEY
                )
                assert answer.status_code == 403, answer.text
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("permission_error", "model_not_allowed")
                assert error["message"] == allowed.format(model)
        unnamed = await ask(stack)
        assert (unnamed.status_code, unnamed.json()["error"]["code"]) == (403, "model_not_allowed")
        models = await stack.http.get("/v1/models", headers=KEY)
        assert models.json()["data"] == []
        assert (await stack.http.get(f"/v1/models/{MODEL}", headers=KEY)).status_code == 403
        async with anthropic.AsyncAnthropic(base_url=stack.url, api_key="secret", max_retries=0) as client:
            with pytest.raises(anthropic.PermissionDeniedError) as refused:
                await client.messages.create(model=MODEL, max_tokens=3, messages=[{"role": "user", "content": "hi"}])
        assert (refused.value.type, refused.value.error_code) == ("permission_error", "model_not_allowed")


@pytest.mark.parametrize(
    "headers",
    [
        KEY,
        {"x-api-key": "secret"},
        {"x-api-key": "secret", "authorization": "Basic cHJveHk6cHJveHk="},
        {"x-api-key": "secret", "authorization": "Bearer"},
        {"x-api-key": "wrong", **KEY},
    ],
)
async def test_a_key_is_read_alike_on_websocket_and_grpc(server: RedisServer, headers: dict[str, str]) -> None:
    port = free_port()
    async with (
        tenancy(server, entry("secret"), grpc_port=port) as stack,
        websockets.connect(f"ws{stack.url[4:]}/v1/stream", proxy=None, additional_headers=headers) as socket,
        open_channel(f"127.0.0.1:{port}") as channel,
    ):
        await socket.send(json.dumps({"type": "start", "id": "a", "kind": "completion", "request": {"prompt": "a"}}))
        assert json.loads(await socket.recv())["type"] == "started"
        stub = inference_pb2_grpc.InferenceStub(channel)
        listed = await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=[*headers.items()])
        assert [model.id for model in listed.models] == [MODEL]
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.ListModels(inference_pb2.ListModelsRequest(), metadata=[("x-api-key", "wrong")])
        assert unknown.value.code() == grpc.StatusCode.UNAUTHENTICATED


async def test_without_redis_limits_are_local_and_requests_fast(server: RedisServer) -> None:
    fields = {"requests_per_minute": 6, "tokens_per_minute": 100, "tokens_per_month": 10**9}
    async with tenancy(server, entry("secret", **fields), redis_timeout_s=0.2, gateway_replicas=2) as stack:
        server.freeze()
        first = time.monotonic()
        assert (await ask(stack)).status_code == 200
        statuses = [(await ask(stack)).status_code for _ in range(3)]
        assert time.monotonic() - first < 15.0, "no request waits long, and the local window is still the first"
        assert statuses == [200, 200, 429], "6 per minute shared by 2 gateways"
        unknown = await ask(stack, "another")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "keys_unavailable")
        server.thaw()
        async with asyncio.timeout(40):  # the local window lasts for a minute
            while (await ask(stack)).status_code != 200:  # noqa: ASYNC110  # Redis is looked at again after a while
                await asyncio.sleep(0.1)
        assert int(server.client.get(next(iter(server.client.scan_iter("rz:default:rl*"))))) >= 1


async def test_gateways_count_each_other_in_redis(server: RedisServer) -> None:
    fields = {"requests_per_minute": 6, "max_concurrent": 2}
    async with tenancy(server, entry("secret", **fields), redis_timeout_s=0.5) as stack:

        def peers(gateway: Gateway) -> float | None:
            return gateway.metrics.registry.get_sample_value("ryzanstein_gateway_live_peers")

        settings = fast_settings(router_addresses=stack.router.address, redis_url=server.url, tenancy=True)
        async with running_gateway(settings) as other:
            await eventually(lambda: (peers(stack.gateway), peers(other)) == (2, 2))
            server.freeze()
            statuses = [(await ask(stack)).status_code for _ in range(4)]
            assert statuses == [200, 200, 200, 429], "Redis is away: half of six"
            server.thaw()
            await eventually(lambda: peers(stack.gateway) == 2)
        await eventually(lambda: peers(stack.gateway) == 1)
        assert (stack.gateway.metrics.registry.get_sample_value("ryzanstein_gateway_redis_seconds_count") or 0) > 0


async def test_deterministic_answers_are_kept(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url, response_cache_ttl_s=60) as stack:
        worker = stack.workers[0]

        async def texts(stored: int, **fields: Any) -> tuple[str, str]:
            """The text of a whole answer, and of a streamed one once `kept` answers are in the cache."""
            whole = (await stack.complete(prompt=PROMPT, max_tokens=12, **fields)).json()["choices"][0]
            await eventually(lambda: len(server.client.keys("rz:*:resp:*")) == stored)
            streamed = ""
            stream = await stack.client.completions.create(
                model="test-model", prompt=PROMPT, max_tokens=12, stream=True, **fields
            )
            async for chunk in stream:
                streamed += chunk.choices[0].text
            return whole["text"], streamed

        whole, streamed = await texts(1, seed=4)
        assert whole == streamed
        assert len(worker.submits) == 1, "the second was answered from the cache"
        stop = whole[8:10]
        cut, cut_again = await texts(2, seed=4, stop=[stop])
        assert cut == cut_again == whole[: whole.index(stop)]
        assert len(worker.submits) == 2
        await texts(3, temperature=0)
        assert len(worker.submits) == 3, "no seed is needed at temperature 0"
        await texts(3)
        assert len(worker.submits) == 5, "a random answer is never kept"
        await texts(3, seed=4, logprobs=1)
        assert len(worker.submits) == 7
        server.freeze()
        assert (await stack.complete(prompt=PROMPT, max_tokens=12, seed=4)).status_code == 200
        server.thaw()


async def test_a_cancelled_request_settles_too(server: RedisServer) -> None:
    async with tenancy(server, entry("secret", max_concurrent=1)) as stack:
        stack.workers[0].step_s = 0.05
        request = asyncio.create_task(ask(stack, max_tokens=100))
        await eventually(lambda: stack.workers[0].submits)
        request.cancel()
        await eventually(lambda: stack.workers[0].cancelled)
        async with asyncio.timeout(60):
            while (await ask(stack, max_tokens=1)).status_code != 200:  # noqa: ASYNC110  # settling is not announced
                await asyncio.sleep(0.02)
