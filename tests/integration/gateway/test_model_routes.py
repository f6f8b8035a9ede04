"""Routes: names for models, from a file and live, on two gateways with one Redis, and their fallbacks."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import worker_pb2
from typer.testing import CliRunner

from services.cli.main import app
from services.common.lifecycle import StartupError
from services.common.ports import free_port
from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import MAX_LEN, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, fast_settings, running_gateway, running_stack
from tests.integration.gateway.redis_server import RedisServer, running_redis
from tests.integration.gateway.test_inference_grpc import inference
from tests.integration.gateway.test_stream_socket import SocketClient, connect
from tests.integration.gateway.test_telemetry import scrape, scrape_until

TOKEN = "an administrator's token"
BIG, SMALL = "big", "small"


def workers() -> list[Worker]:
    return [Worker("w0", model=BIG), Worker("w1", model=SMALL)]


def routes_file(folder: Path, **routes: Any) -> str:
    path = folder / "routes.json"
    path.write_text(json.dumps({"routes": routes}))
    return str(path)


def to(*models: str, **fields: Any) -> dict[str, Any]:
    return {"targets": [{"model": model} for model in models], **fields}


async def ask(http: httpx.AsyncClient, model: str, **fields: Any) -> httpx.Response:
    headers = {"x-session-id": fields.pop("session", "")}
    headers |= {"authorization": f"Bearer {fields.pop('key')}"} if "key" in fields else {}
    body = {"model": model, "prompt": "hello", "max_tokens": 2, **fields}
    return await http.post("/v1/completions", json=body, headers=headers)


@dataclass
class RouteInstallation:
    first: GatewayStack
    second: httpx.AsyncClient  # client of another gateway
    admin: str
    redis: RedisServer

    async def routes(self, *arguments: str, token: str = TOKEN, fails: str = "") -> str:
        """The output of `ryzanstein routes`."""
        command = ["routes", *arguments, "--url", self.admin]
        ran = await asyncio.to_thread(CliRunner().invoke, app, command, env={"RYZANSTEIN_ADMIN_TOKEN": token})
        assert ran.exit_code == (1 if fails else 0), ran.output
        assert fails in ran.output.replace("\n", " ")
        return ran.output.strip()

    async def answered_everywhere(self, model: str, by: str) -> None:
        async with asyncio.timeout(60):
            for http in (self.first.http, self.second):
                while (await ask(http, model)).json().get("model") != by:  # noqa: ASYNC110  # no event tells
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def installation(tmp_path: Path, **overrides: Any) -> AsyncIterator[RouteInstallation]:
    with running_redis(tmp_path) as redis:
        settings = {"redis_url": redis.url, **overrides}
        port = free_port()
        async with running_stack(workers(), admin_port=port, admin_token=TOKEN, **settings) as stack:
            other = fast_settings(router_addresses=stack.router.address, **settings)
            async with running_gateway(other) as second:
                await eventually(lambda: len(second.catalog.available()) == 2)
                url = f"http://127.0.0.1:{second.http.port}"
                async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=120) as http:
                    yield RouteInstallation(stack, http, f"http://127.0.0.1:{port}", redis)


async def test_live_routes_win_over_those_of_the_file_and_are_versioned_and_audited(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "services.gateway.audit")
    file = routes_file(tmp_path, chat=to(BIG), code=to(SMALL))
    async with installation(tmp_path, routes_file=file) as there:
        await there.answered_everywhere("chat", BIG)
        assert await there.routes("set", "chat", "--target", SMALL, "--if-version", "0") == "chat: version 1"
        await there.answered_everywhere("chat", SMALL)
        await there.routes("set", "chat", "--target", BIG, "--if-version", "0", fails="has version 1, not 0")
        weights = ["--target", f"{BIG}=0", "--target", f"{SMALL}=7", "--fallback", f"{BIG}=no_worker,error"]
        assert await there.routes("set", "chat", *weights, "--if-version", "1") == "chat: version 2"

        listed = {route["name"]: route for route in json.loads(await there.routes("list", "--json"))}
        assert {name: route["source"] for name, route in listed.items()} == {"chat": "live", "code": "file"}
        assert (listed["chat"]["version"], listed["chat"]["by"]) == (2, "token")
        assert listed["chat"]["route"]["fallbacks"] == [{"model": BIG, "external": "", "when": ["no_worker", "error"]}]
        assert "small 100 %" in await there.routes("list")

        there.redis.client.hset("rz:default:routes", "broken", "no route")
        await there.routes("delete", "chat", "--if-version", "2")
        await there.answered_everywhere("chat", BIG)
        await there.routes("delete", "chat", fails="There is no live route `chat`")
        changes = json.loads(await there.routes("history", "--json"))
        assert [(change["action"], change["version"], change["by"]) for change in changes] == [
            ("deleted", 3, "token"), ("set", 2, "token"), ("set", 1, "token"),
        ]  # fmt: skip
        assert json.loads(await there.routes("history", "chat", "--limit", "1", "--json")) == changes[:1]
        await there.routes("set", "chat", "--target", BIG, token="another", fails="The administrator's token is needed")
        await there.routes("set", "chat", "--target", f"{BIG}=0", fails="needs a `weight` above 0")

        await there.routes("set", "draft", "--target", SMALL, "--mirror", f"{BIG}=5%")
        assert "big 5 %" in await there.routes("list")
        await there.routes("set", "draft", "--target", BIG, "--mirror", BIG, fails="expected a share such as 5%")
        await there.answered_everywhere("draft", SMALL)
        there.redis.hide()  # the routes stay as they were
        await there.answered_everywhere("draft", SMALL)
        there.redis.show()
        rights = "resetkeys", "~rz:default:adapters", "~rz:default:gateways"  # rules before there were routes
        there.redis.client.execute_command("ACL", "SETUSER", "gateway", *rights)
        for key in ("routes", "routes-canaries"):
            await eventually(lambda key=key: caplog.text.count(f"may not read rz:default:{key},") == 2)
        await there.answered_everywhere("draft", SMALL)
        await scrape_until(there.first, 1, "redis_up")
    assert "limits are local until it is back: its ACL" not in caplog.text, "missing rights are no outage"
    audited = [record for record in caplog.records if record.name.endswith("audit")]
    assert [(record.message, record.route, record.version, record.by) for record in audited] == [
        ("route set", "chat", 1, "token"),
        ("route set", "chat", 2, "token"),
        ("route deleted", "chat", 2, "token"),
        ("route set", "draft", 4, "token"),
    ]


async def test_gateway_follows_its_own_changes_at_once(tmp_path: Path) -> None:
    async with installation(tmp_path) as there:
        http = there.first.http
        for model in (SMALL, BIG) * 3:
            await there.routes("set", "chat", "--target", model)
            assert (await ask(http, "chat")).json()["model"] == model
        await there.routes("delete", "chat")
        assert (await ask(http, "chat")).status_code == 404


async def test_file_is_read_again_when_changed_and_stays_when_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = routes_file(tmp_path, chat=to(BIG))
    async with running_stack(workers(), routes_file=file) as stack:

        async def until_listed(*names: str) -> list[dict[str, Any]]:
            async with asyncio.timeout(60):
                while True:
                    listed = (await stack.http.get("/v1/models")).json()["data"]
                    if [model["id"] for model in listed] == [BIG, SMALL, *names]:
                        return list(listed)
                    await asyncio.sleep(0.02)

        routes_file(tmp_path, chat={"targets": []})
        await eventually(lambda: "route `chat`: " in caplog.text)
        assert (await ask(stack.http, "chat")).json()["model"] == BIG
        routes_file(tmp_path)
        await until_listed()
        routes_file(tmp_path, other=to(SMALL, BIG))
        listed = await until_listed("other")
        assert [model.get("targets") for model in listed] == [None, None, [SMALL, BIG]]
        assert (await stack.http.get("/v1/models/other")).json() == listed[2]
        assert listed[2]["max_model_len"] == MAX_LEN
        refusal = await ask(stack.http, "chat")
        assert refusal.status_code == 404
        assert "`other`" in refusal.json()["error"]["message"]


def test_gateway_does_not_start_with_a_wrong_file(tmp_path: Path) -> None:
    async def start() -> None:
        async with running_gateway(fast_settings(routes_file=routes_file(tmp_path, chat={}))):
            pass

    with pytest.raises(StartupError, match="route `chat`: Object missing required field `targets`"):
        asyncio.run(start())


async def test_weights_share_requests_and_sessions_stay_on_every_gateway(tmp_path: Path) -> None:
    route = {"targets": [{"model": BIG, "weight": 3}, {"model": SMALL, "weight": 1}]}
    async with installation(tmp_path, routes_file=routes_file(tmp_path, chat=route)) as there:

        async def target(http: httpx.AsyncClient, session: str = "") -> str:
            answer = await ask(http, "chat", session=session, max_tokens=1)
            assert answer.headers["x-ryzanstein-target"] == answer.json()["model"]
            return str(answer.json()["model"])

        sessions = [f"session {n}" for n in range(12)]
        first = [await target(there.first.http, session) for session in sessions]
        assert [await target(there.second, session) for session in sessions] == first
        assert {*first} == {BIG, SMALL}
        counts = Counter([await target(there.first.http) for _ in range(80)])
        assert 40 <= counts[BIG] <= 76
        assert (await scrape(there.first))["routed_requests_total", SMALL, "chat"] == counts[SMALL] + first.count(SMALL)


async def test_keys_for_a_route_reach_its_targets_and_keys_for_targets_reach_these_alone(tmp_path: Path) -> None:
    allowed = {"route": ["chat"], "target": [SMALL], "other": ["x"]}
    keys = [{"key_sha256": digest_of(name), "name": name, "models": models} for name, models in allowed.items()]
    settings = {"routes_file": routes_file(tmp_path, chat=to(BIG, SMALL)), "tenancy": True}
    async with running_stack(workers(), api_keys=json.dumps(keys), **settings) as stack:

        async def targets(key: str, model: str) -> set[object]:
            answers = [await ask(stack.http, model, key=key, session=f"s{n}") for n in range(8)]
            return {a.json()["model"] if a.status_code == 200 else a.status_code for a in answers}

        async def names(key: str) -> list[str]:
            answer = await stack.http.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            return [model["id"] for model in answer.json()["data"]]

        assert (await targets("route", "chat"), await names("route")) == ({BIG, SMALL}, ["chat"])
        assert await targets("route", BIG) == {403}
        assert (await targets("target", "chat"), await names("target")) == ({SMALL}, [SMALL, "chat"])
        assert (await targets("other", "chat"), await names("other")) == ({403}, [])


async def test_every_api_answers_for_a_route_with_its_target(tmp_path: Path) -> None:
    async with inference(workers(), routes_file=routes_file(tmp_path, chat=to(SMALL))) as (stack, stub):
        message = [{"role": "user", "content": "hi"}]
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": message, "max_tokens": 2},
            "/v1/responses": {"input": "hi", "max_output_tokens": 2},
            "/v1/messages": {"messages": message, "max_tokens": 2},
            "/v1/embeddings": {"input": "hi"},
        }
        for path, body in bodies.items():
            answer = await stack.http.post(path, json=body | {"model": "chat"})
            assert (answer.json()["model"], answer.headers["x-ryzanstein-target"]) == (SMALL, SMALL), answer.text
            assert "x-ryzanstein-fallback-model" not in answer.headers
        chunks = await stack.http.post(path := "/v1/completions", json={"model": "chat", "prompt": "a", "stream": True})
        assert json.loads(chunks.text.split("\n")[0].removeprefix("data: "))["model"] == SMALL, path
        assert (await stack.http.post("/tokenize", json={"model": "chat", "prompt": "a"})).json()["count"] == 1
        async with connect(stack) as socket:
            client = SocketClient(socket)
            await client.start("a", 2, model="chat", prompt="hi")
            assert (await client.receive())["model"] == SMALL
        options = pb.GenerationOptions(max_tokens=2)
        call = stub.Generate(pb.GenerateRequest(model="chat", prompt="hi", options=options))
        assert dict(await call.initial_metadata())["x-ryzanstein-target"] == SMALL
        assert "chat" in [model.id for model in (await stub.ListModels(pb.ListModelsRequest())).models]
        assert not stack.workers[0].submits


Break = Callable[[GatewayStack], Awaitable[None]]


async def killed(stack: GatewayStack) -> None:
    await stack.workers[0].stop()  # routers list it for a while


async def gone(stack: GatewayStack) -> None:
    stack.router.hidden = {"w0"}
    await eventually(lambda: len(stack.gateway.catalog.available()) == 1)


async def mistaken(stack: GatewayStack) -> None:
    stack.workers[0].faults = [Fault("mistake", 0)]


async def full(stack: GatewayStack) -> None:
    stack.router.full = {BIG}


async def short(stack: GatewayStack) -> None:
    """The model's context is too short for 2 * MAX_LEN tokens."""


@pytest.mark.parametrize(
    ("break_it", "when"),
    [
        (killed, "no_worker"),
        (gone, "no_worker"),
        (mistaken, "error"),
        (full, "overloaded"),
        (short, "context_too_long"),
    ],
)
async def test_fallback_takes_over_on_its_condition_alone(tmp_path: Path, break_it: Break, when: str) -> None:
    others = [each for each in ("no_worker", "overloaded", "context_too_long", "error") if each != when]
    routes = {
        "yes": to(BIG, fallbacks=[{"model": "absent"}, {"model": SMALL, "when": [when]}]),
        "no": to(BIG, fallbacks=[{"model": SMALL, "when": others}]),
    }
    fleet = workers()
    fleet[1].abilities = worker_pb2.ModelCard(max_model_len=4 * MAX_LEN)
    fleet[1].end_at = 2
    settings = {"routes_file": routes_file(tmp_path, **routes), "resume_deadline_s": 1.0}
    async with running_stack(fleet, **settings) as stack:
        for stream in (False, True):
            await break_it(stack)
            answer = await ask(stack.http, "yes", max_tokens=2 * MAX_LEN if break_it is short else 4, stream=stream)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ryzanstein-fallback-model"] == answer.headers["x-ryzanstein-target"] == SMALL
        assert (await scrape(stack))["fallbacks_total", "yes"] == 2
        await break_it(stack)
        refusal = await ask(stack.http, "no", max_tokens=2 * MAX_LEN if break_it is short else 4)
        assert refusal.is_error, refusal.text
        assert "x-ryzanstein-fallback-model" not in refusal.headers


@pytest.mark.parametrize(("name", "fallback"), [("chat", ""), (BIG, SMALL)])
async def test_requests_before_their_first_token_move_to_the_fallback_when_their_pool_is_killed(
    tmp_path: Path, name: str, fallback: str
) -> None:
    fleet = [Worker(f"w{n}", model=BIG, prefill_s=600) for n in range(2)] + [Worker("small", model=SMALL)]
    route = to(BIG, fallbacks=[{"model": SMALL, "when": ["no_worker"]}])
    file = routes_file(tmp_path, chat=route)
    settings = {"routes_file": file, "resume_deadline_s": 600, "fallback_model": fallback}
    async with running_stack(fleet, **settings) as stack:
        waiting = [asyncio.create_task(ask(stack.http, name, stream=bool(n % 2))) for n in range(24)]
        await eventually(lambda: len(fleet[0].submits) + len(fleet[1].submits) == len(waiting))
        placed = len(stack.router.routes)
        stack.router.away, stack.router.queue_s = {"w0", "w1"}, 600  # the gateway's list has them for a while
        await asyncio.gather(fleet[0].stop(), fleet[1].stop())
        answers = await asyncio.gather(*waiting, *(ask(stack.http, name, stream=bool(n % 2)) for n in range(24)))
        assert {(a.status_code, a.headers["x-ryzanstein-fallback-model"]) for a in answers} == {(200, SMALL)}
        assert len(fleet[2].submits) == len(answers)
        waits = [route.patience_ms for route in stack.router.routes[placed:] if route.model == BIG]
        assert len(waits) >= len(answers)
        assert all(0 < wait <= 500 for wait in waits), "routers look for a worker no longer than the route says"


async def test_request_has_its_whole_patience_when_no_fallback_has_a_worker(tmp_path: Path) -> None:
    routes = {"alone": to(BIG, fallbacks=[{"model": "absent"}]), "backed": to(BIG, fallbacks=[{"model": SMALL}])}
    async with running_stack(workers(), routes_file=routes_file(tmp_path, **routes), patience_s=60) as stack:
        for name in routes:
            assert (await ask(stack.http, name)).status_code == 200
        alone, backed = (route.patience_ms for route in stack.router.routes)
        assert backed <= 500 < alone


async def test_route_sets_the_patience_of_requests_without_the_header(tmp_path: Path) -> None:
    route = routes_file(tmp_path, **{BIG: to(BIG, patience_s=200)})
    async with running_stack(workers(), routes_file=route, patience_s=60, stream_patience_s=100) as stack:
        for stream in (False, True):
            assert (await ask(stack.http, BIG, stream=stream)).status_code == 200
        body, headers = {"model": BIG, "prompt": "hello", "max_tokens": 2}, {"x-ryzanstein-patience": "5"}
        assert (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert (await ask(stack.http, SMALL)).status_code == 200
        plain, streamed, named, other = (route.patience_ms for route in stack.router.routes)
    assert min(plain, streamed) > 100_000
    assert max(plain, streamed) <= 200_000
    assert named <= 5_000 < other <= 60_000


async def test_fallback_model_does_not_cut_short_the_wake_of_a_model() -> None:
    async with running_stack(workers(), fallback_model=SMALL) as stack:
        assert (await ask(stack.http, BIG)).status_code == 200
        for phase in (worker_pb2.PHASE_SLEEPING, worker_pb2.PHASE_WAKING):
            stack.router.phases = {worker.worker_id: phase for worker in stack.workers if worker.model == BIG}
            await stack.gateway.catalog.refresh()
            assert (await ask(stack.http, BIG)).json()["model"] == BIG
        first, *later = (route.patience_ms for route in stack.router.routes)
        assert (0 < first <= 500, later) == (True, [0, 0]), "0: as long as routers queue requests"


@pytest.mark.parametrize("stream", [False, True])
async def test_chain_goes_on_when_its_fallbacks_fail(tmp_path: Path, stream: bool) -> None:
    names = "a", "b", "c", "d"
    fleet = [Worker(name, model=name, faults=[Fault("mistake", 0)] if name != "d" else []) for name in names]
    route = to("a", fallbacks=[{"model": name, "when": ["error"]} for name in names[1:]])
    async with running_stack(fleet, routes_file=routes_file(tmp_path, chat=route)) as stack:
        answer = await ask(stack.http, "chat", stream=stream)
        assert (answer.status_code, answer.headers["x-ryzanstein-target"]) == (200, "d")
        assert [len(worker.submits) for worker in fleet] == [1, 1, 1, 1]


async def test_request_that_breaks_workers_is_ended_and_breaks_no_fallback(tmp_path: Path) -> None:
    fleet = [Worker(f"w{n}", model=BIG, faults=[Fault("break", 0)] * 3) for n in range(3)] + [Worker("s", model=SMALL)]
    route = to(BIG, fallbacks=[{"model": SMALL, "when": ["error"]}])
    async with running_stack(fleet, routes_file=routes_file(tmp_path, chat=route)) as stack:
        answer = await ask(stack.http, "chat")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "poison")
        assert not fleet[-1].submits
