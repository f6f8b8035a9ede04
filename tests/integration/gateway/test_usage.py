"""The usage API's sums are those of the answers, over every API."""

from __future__ import annotations

import asyncio
import csv
import json
import time
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
import websockets
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc
from typer.testing import CliRunner

from services.cli.main import app
from services.common.ports import free_port
from services.common.rpc import open_channel
from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import MODEL, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.integration.gateway.redis_server import RedisServer
from tests.integration.gateway.test_batches import begin, over, request
from tests.integration.gateway.usage import (
    BODIES,
    CACHED,
    COSTS,
    EMBEDDED,
    TENANCY,
    USAGE,
    Bill,
    ask,
    authorized,
    last_usage,
    read,
    results,
    sums,
    usage_of,
    waiting,
)


async def cancel_on_socket(stack: GatewayStack, key: str, **fields: Any) -> dict[str, Any]:
    """The usage of a generation that its client cancels after some tokens."""
    address = f"ws{stack.url[4:]}/v1/stream"
    async with websockets.connect(address, proxy=None, additional_headers=authorized(key)) as socket:
        body = {"prompt": "Cancel me", "max_tokens": 200} | fields
        await socket.send(json.dumps({"type": "start", "id": "a", "kind": "completion", "request": body}))
        cancelled = False
        while (message := json.loads(await socket.recv()))["type"] != "done":
            if message["type"] == "token" and not cancelled:
                cancelled = True
                await socket.send(json.dumps({"type": "cancel", "id": "a"}))
        return message["usage"]


async def call(port: int, key: str) -> dict[str, Any]:
    """The usage of a gRPC call, and its cost if its model has a price."""
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        options = pb.GenerationOptions(max_tokens=9)
        calling = stub.Generate(pb.GenerateRequest(prompt="over gRPC", options=options), metadata=[("x-api-key", key)])
        usage = [response.usage async for response in calling][-1]
        return {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        } | ({"cost": usage.cost} if usage.HasField("cost") else {})


async def test_usage_sums_equal_sums_of_answers_of_every_api(server: RedisServer) -> None:
    port = free_port()
    worker = Worker("w0", cached_tokens=CACHED, step_s=0.001)
    async with running_stack([worker], redis_url=server.url, grpc_port=port, **TENANCY) as stack:
        bill, embedded = Bill(), Bill()

        async def one(number: int) -> None:
            key = ("a1", "a2", "b1")[number % 3]
            path, body = BODIES[number % len(BODIES)]
            bill.add(key, await ask(stack.http, key, path, body, stream=number % 5 < 2))

        await asyncio.gather(*(one(number) for number in range(150)))
        bill.add("a1", await cancel_on_socket(stack, "a1"))
        bill.add("b1", await call(port, "b1"))
        for path, body in (
            ("/v1/embeddings", {"input": ["some", "texts"]}),
            ("/v1/rerank", {"query": "q", "documents": ["one", "two"]}),
        ):
            answer = await stack.http.post(path, json=body, headers=authorized("a2"))
            embedded.add("a2", answer.json()["usage"])
        refused = await stack.http.post("/v1/completions", json={"prompt": ""}, headers=authorized("a1"))
        assert refused.status_code == 400, "a refused request counts nothing"

        report = sums(await read(stack.http, group_by=["api_key_id", "project_id", "model"]), "api_key_id", "model")
        assert report == {(digest_of(key)[:12], MODEL): counts for key, counts in bill.of.items()}
        every = sum(bill.of.values(), Counter())
        assert sums(await read(stack.http)) == {(): every}
        assert sums(await read(stack.http, bucket_width="1h", limit=24)) == {(): every}
        assert sums(await read(stack.http, bucket_width="1d", limit=7)) == {(): every}
        texts = sums(await read(stack.http, EMBEDDED, group_by="api_key_id"), "api_key_id")
        assert texts == {(digest_of("a2")[:12],): embedded.of["a2"]}
        acme = bill.of["a1"] + bill.of["a2"] + embedded.of["a2"]
        assert server.sum_of("rz:default:quota:acme:*") == acme["input_tokens"] + acme["output_tokens"]


async def test_abandoned_stream_counts_the_generated_tokens(server: RedisServer) -> None:
    async with running_stack([Worker("w0", step_s=0.005)], redis_url=server.url) as stack:
        body = {"prompt": "Leave me", "max_tokens": 200, "stream": True}
        async with stack.http.stream("POST", "/v1/completions", json=body) as answer:
            await anext(answer.aiter_lines())
        async with asyncio.timeout(60):
            while not (counted := sums(await read(stack.http))):  # noqa: ASYNC110  # counted after the client's end
                await asyncio.sleep(0.05)
        assert 1 <= counted[()]["output_tokens"] < 200
        assert counted[()]["num_model_requests"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_end_of_an_answer_waits_for_its_count(server: RedisServer, stream: bool) -> None:
    steps = asyncio.Semaphore(0)
    worker = Worker("w0", steps=steps)
    async with running_stack([worker], redis_url=server.url, redis_timeout_s=60.0) as stack:
        asking = asyncio.create_task(ask(stack.http, "", *BODIES[0], stream=stream))
        await eventually(lambda: bool(worker.submits))
        server.freeze()
        for _ in range(BODIES[0][1]["max_tokens"]):
            steps.release()
        await eventually(lambda: waiting(stack) > 0)
        await asyncio.wait([asking], timeout=0.3)
        assert not asking.done(), "its count is not safe yet"
        server.thaw()
        assert usage_of(await asking) == sums(await read(stack.http))[()]


async def test_failed_stream_counts_the_tokens_of_its_error(server: RedisServer) -> None:
    worker = Worker("w0", faults=[Fault("mistake", 3)])
    async with running_stack([worker], redis_url=server.url) as stack:
        answer = await stack.complete(**BODIES[0][1])
        assert answer.status_code == 500
        assert answer.json()["usage"]["completion_tokens"] == 3
        assert usage_of(answer.json()["usage"]) == sums(await read(stack.http))[()]
        worker.faults.append(Fault("mistake", 0))
        assert (await stack.complete(**BODIES[0][1])).status_code == 500
        assert sums(await read(stack.http))[()]["num_model_requests"] == 1, "no token, no count"


async def test_batch_and_drafted_tokens_are_counted_apart(server: RedisServer) -> None:
    prices = '{"*": {"output": 1000, "batch_factor": 0.5}}'
    async with running_stack([Worker("w0", sizes=(1, 4, 2))], redis_url=server.url, prices=prices) as stack:
        done = await over(stack.client, await begin(stack.client, [request("a"), request("b")]))
        body = {"prompt": "a", "prediction": "A list is a sequence", "max_tokens": 10, "seed": 1}
        answer = await stack.complete(**body)
        (batched,), (single,) = [results(await read(stack.http, batch=batch)) for batch in ("true", "false")]
        assert done.usage is not None
        assert (batched["input_tokens"], batched["output_tokens"]) == (
            done.usage.input_tokens,
            done.usage.output_tokens,
        )
        assert batched["num_model_requests"] == 2
        details = answer.json()["usage"]["completion_tokens_details"]
        assert {name: single[name] for name in details} == details
        grouped = sums(await read(stack.http, group_by="batch"), "batch")
        assert {batch: counts["num_model_requests"] for (batch,), counts in grouped.items()} == {True: 2, False: 1}
        costs = {
            one["batch"]: one["amount"]["value"] for one in results(await read(stack.http, COSTS, group_by="batch"))
        }
        assert costs == pytest.approx({True: batched["output_tokens"] / 2000, False: single["output_tokens"] / 1000})
        printed = (await asyncio.to_thread(CliRunner().invoke, app, ["usage", "--csv", "--url", stack.url])).output
        (row,) = csv.DictReader(printed.splitlines())
        assert (int(row["accepted"]), int(row["rejected"])) == tuple(details.values())


async def test_buckets_are_pruned_by_age(server: RedisServer) -> None:
    stored = {"usage_minutes_s": 600, "usage_hours_s": 0, "usage_days_s": 86_400}
    async with running_stack([Worker("w0")], redis_url=server.url, **stored) as stack:
        await stack.complete(prompt="a", max_tokens=3)
        expires_at = {key.decode(): time.time() + server.client.ttl(key) for key in server.client.keys("rz:*:usage:*")}
        buckets = {key.split(":")[3]: (int(key.split(":")[4]), at) for key, at in expires_at.items()}
        assert set(buckets) == {"1m", "1d"}
        for width_s, kept_s, (begins_at, at) in ((60, 600, buckets["1m"]), (86_400, 86_400, buckets["1d"])):
            assert at == pytest.approx(begins_at + width_s + kept_s, abs=30)
        old = {"start_time": int(time.time()) - 1000, "bucket_width": "1m"}
        answer = await stack.http.get(USAGE, params=old)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "usage_not_kept")


async def test_pages_follow_each_other_without_gap(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url) as stack:
        await stack.complete(prompt="a", max_tokens=3)
        begin_at = int(time.time()) // 60 * 60 - 300
        query: dict[str, Any] = {"start_time": begin_at, "bucket_width": "1m", "limit": 2}
        buckets = []
        while query:
            page = (await stack.http.get(USAGE, params=query)).json()
            buckets += page["data"]
            query = {**query, "page": page["next_page"]} if page["has_more"] else {}
        assert buckets[0]["start_time"] == begin_at
        assert all(one["end_time"] == two["start_time"] for one, two in pairwise(buckets))
        assert sum(bool(bucket["results"]) for bucket in buckets) == 1


async def test_key_reads_the_usage_of_its_own_tenant(server: RedisServer) -> None:
    async with running_stack([Worker("w0")], redis_url=server.url, **TENANCY) as stack:
        for key in ("a1", "b1"):
            await ask(stack.http, key, *BODIES[0], stream=False)
        own = await read(stack.http, key="a2", group_by="project_id")
        assert [result["project_id"] for result in results(own)] == ["acme"]
        both = await read(stack.http, group_by="project_id")
        assert {result["project_id"] for result in results(both)} == {"acme", "bolt"}
        bolt = await read(stack.http, **{"project_ids[]": "bolt", "group_by[]": "project_id"})
        assert [result["project_id"] for result in results(bolt)] == ["bolt"]
        foreign = {"start_time": int(time.time()) - 60, "project_ids": "bolt"}
        answer = await stack.http.get(USAGE, params=foreign, headers=authorized("a1"))
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden")
        assert (await stack.http.get(USAGE, params=foreign)).status_code == 401


async def test_wrong_query_is_refused_by_name(stack: GatewayStack) -> None:
    for query, param, named in (
        ({}, "start_time", "start_time"),
        ({"start_time": "soon"}, "start_time", "int"),
        ({"start_time": "1", "bucket_width": "2d"}, "bucket_width", "`1d`, `1h`, `1m`"),
        ({"start_time": "1", "group_by": "user_id"}, "group_by[0]", "`project_id`"),
        ({"start_time": "1", "user_ids": "u"}, "user_ids", "Known fields"),
        ({"start_time": "1", "limit": "0"}, "limit", "1"),
        ({"start_time": "1", "limit": "10000"}, "limit", "180"),
        ({"start_time": "1", "page": "next"}, "page", "page_"),
        ({"start_time": "1"}, "start_time", "at least"),
    ):
        for path in (USAGE, EMBEDDED, COSTS):
            answer = await stack.http.get(path, params=query)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param), answer.text
            assert named in error["message"]


async def test_costs_are_those_of_the_prices_by_kind_of_token(server: RedisServer) -> None:
    prices = {MODEL: {"input": 2.0, "cached_input": 0.5, "output": 8.0}, "*": {"input": 100}}
    fields = {"prices": json.dumps(prices), "currency": "eur"}
    async with running_stack([Worker("w0", cached_tokens=CACHED)], redis_url=server.url, **fields) as stack:
        bill = Bill()
        for path, body in BODIES:
            bill.add("", await ask(stack.http, "", path, body, stream=False))
        used = bill.of[""]
        uncached = used["input_tokens"] - used["input_cached_tokens"]
        expected = {
            f"{MODEL}, input_tokens": 2e-6 * uncached,
            f"{MODEL}, input_cached_tokens": 0.5e-6 * used["input_cached_tokens"],
            f"{MODEL}, output_tokens": 8e-6 * used["output_tokens"],
        }
        items = results(await read(stack.http, COSTS, group_by=["line_item", "project_id"]))
        assert {item["line_item"]: item["amount"]["value"] for item in items} == pytest.approx(expected)
        assert {item["amount"]["currency"] for item in items} == {"eur"}
        quantities = {item["line_item"].split(", ")[1]: item["quantity"] for item in items}
        assert quantities == {"input_tokens": uncached} | {name: used[name] for name in list(quantities)[1:]}
        output = f"{MODEL}, output_tokens"
        (one,) = results(await read(stack.http, COSTS, line_items=output))
        assert (one["line_item"], one["amount"]["value"]) == (None, pytest.approx(expected[output]))
        (whole,) = results(await read(stack.http, COSTS))
        assert whole["amount"]["value"] == pytest.approx(sum(expected.values()))
        assert whole["object"] == "organization.costs.result"
        assert whole["line_item"] is None
        counter = "ryzanstein_gateway_cost_total"
        labels = {"model": MODEL, "tenant": ""}
        assert stack.gateway.metrics.registry.get_sample_value(counter, labels) == pytest.approx(sum(expected.values()))

        command = ["usage", "--csv", "--by", "model", "--url", stack.url]
        printed = (await asyncio.to_thread(CliRunner().invoke, app, command)).output
        (row,) = csv.DictReader(printed.splitlines())
        assert row["model"] == MODEL
        sums_of_tokens = {name: int(row[name]) for name in ("input", "cached", "output", "requests")}
        assert list(sums_of_tokens.values()) == [
            used[name] for name in ("input_tokens", "input_cached_tokens", "output_tokens", "num_model_requests")
        ]
        assert float(row["cost (eur)"]) == pytest.approx(sum(expected.values()), abs=1e-6)
        table = (await asyncio.to_thread(CliRunner().invoke, app, [*command[:1], *command[2:]])).output
        assert MODEL in table
        assert str(used["output_tokens"]) in table
        for option, value in (("--since", "soon"), ("--by", "user")):
            wrong = await asyncio.to_thread(CliRunner().invoke, app, ["usage", option, value, "--url", stack.url])
            assert wrong.exit_code == 1
            assert f"{option} {value}: expected" in wrong.output


async def test_answers_say_their_cost(stack: GatewayStack) -> None:
    assert "x-ryzanstein-cost" not in (await stack.complete(prompt="a")).headers, "its model has no price"
    prices, port = '{"*": {"input": 1000, "output": 10000}}', free_port()
    async with running_stack([Worker("w0", step_s=0.001)], prices=prices, grpc_port=port) as priced:
        cancelled = await cancel_on_socket(priced, "", stream_options={"include_cost": True})
        for usage in (cancelled, await call(port, "")):
            assert usage["cost"] == pytest.approx(usage["prompt_tokens"] / 1000 + usage["completion_tokens"] / 100)
        for path, body in (*BODIES, ("/v1/embeddings", {"input": ["some", "texts"]})):
            answer = await priced.http.post(path, json=body)
            bill = Bill()
            bill.add("", answer.json()["usage"])
            cost = bill.of[""]["input_tokens"] / 1000 + bill.of[""]["output_tokens"] / 100
            assert float(answer.headers["x-ryzanstein-cost"]) == pytest.approx(cost)
            if "embeddings" in path:
                continue
            in_messages = path.endswith("messages")
            wish = {"include_cost": True} if in_messages else {"stream_options": {"include_cost": True}}
            whole = await priced.http.post(path, json=body | wish)
            streamed = await priced.http.post(path, json=body | wish | {"stream": True})
            for usage in (whole.json()["usage"], last_usage(streamed.text)):
                assert usage["cost"] == pytest.approx(cost)
            plain = {} if in_messages or "responses" in path else {"stream_options": {"include_usage": True}}
            unasked = await priced.http.post(path, json=body | plain | {"stream": True})
            for usage in (answer.json()["usage"], last_usage(unasked.text)):
                assert "cost" not in usage


async def test_official_client_reads_usage_and_costs(server: RedisServer) -> None:
    prices = '{"*": {"input": 1000}}'
    async with running_stack([Worker("w0")], redis_url=server.url, prices=prices, **TENANCY) as stack:
        usage = await ask(stack.http, "a1", *BODIES[0], stream=False)
        await stack.http.post("/v1/embeddings", json={"input": "a text"}, headers=authorized("b1"))
        admin = stack.client.with_options(admin_api_key="root").admin.organization.usage
        start = int(time.time()) - 3600
        page = await admin.completions(
            start_time=start, bucket_width="1h", group_by=["project_id", "model"], models=[MODEL], project_ids=["acme"]
        )
        (result,) = [result for bucket in page.data for result in bucket.results]
        assert result.object == "organization.usage.completions.result"
        assert (result.project_id, result.model, result.api_key_id) == ("acme", MODEL, None)
        assert (result.input_tokens, result.num_model_requests) == (usage["prompt_tokens"], 1)
        assert result.input_uncached_tokens == usage["prompt_tokens"]
        page = await admin.embeddings(start_time=start, bucket_width="1h", group_by=["api_key_id"])
        (embedded,) = [result for bucket in page.data for result in bucket.results]
        assert embedded.object == "organization.usage.embeddings.result"
        assert embedded.api_key_id == digest_of("b1")[:12]
        costs = await admin.costs(start_time=start, group_by=["project_id", "line_item"])
        of = {(result.project_id, result.line_item): result for bucket in costs.data for result in bucket.results}
        acme = of["acme", f"{MODEL}, input_tokens"]
        assert acme.object == "organization.costs.result"
        assert acme.amount is not None
        assert acme.amount.value == pytest.approx(usage["prompt_tokens"] / 1000)
