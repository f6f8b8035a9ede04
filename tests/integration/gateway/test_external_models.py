"""External OpenAI-compatible APIs as the last fallbacks of a route: real HTTP servers on this machine."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from services.common.ports import free_port
from services.gateway.names.route import External
from services.gateway.tenants.keys import digest_of
from tests.integration.gateway.fleet import Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.integration.gateway.redis_server import running_redis
from tests.integration.gateway.test_model_routes import BIG, to
from tests.integration.gateway.test_telemetry import scrape
from tests.integration.gateway.usage import read, sums

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}


@dataclass
class Elsewhere:
    """An API: what it got, and what it does next."""

    fault: str = ""  # refuse, down, redirect, break
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)

    async def answer(self, request: Request) -> Response:
        body = json.loads(await request.body())
        self.bodies.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        if self.fault == "redirect":
            return RedirectResponse("http://127.0.0.1:1/v1/chat/completions")
        if self.fault in ("refuse", "down"):
            error = {"error": {"message": f"it is {self.fault}"}}
            return JSONResponse(error, 400 if self.fault == "refuse" else 503)
        if body.get("stream"):
            return StreamingResponse(self._events(body), media_type="text/event-stream")
        message = {"role": "assistant", "content": "from elsewhere"}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        return JSONResponse({"id": "x", "model": f"{body['model']}-2026", "choices": choices, "usage": USAGE})

    async def _events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        for text in ("from ", "elsewhere"):
            choices = [{"index": 0, "delta": {"content": text}, "finish_reason": None}]
            yield f"data: {json.dumps({'id': 'x', 'model': 'y', 'choices': choices})}\n\n"
            if self.fault == "break":
                return
        assert body["stream_options"] == {"include_usage": True}
        yield f"data: {json.dumps({'id': 'x', 'model': 'y', 'choices': [], 'usage': USAGE})}\n\n"
        yield "data: [DONE]\n\n"


@asynccontextmanager
async def elsewhere() -> AsyncIterator[tuple[Elsewhere, str]]:
    """An API and its base URL."""
    api, app, port = Elsewhere(), FastAPI(), free_port()
    app.add_route("/v1/chat/completions", api.answer, methods=["POST"])
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await eventually(lambda: server.started)
    yield api, f"http://127.0.0.1:{port}/v1"
    server.should_exit = True
    await serving


def file(folder: Path, *urls: str) -> str:
    (folder / "key").write_text("secret of the API\n")
    externals = {f"api{n}": {"base_url": url, "key_file": str(folder / "key")} for n, url in enumerate(urls)}
    fallbacks = [{"model": f"other{n}", "external": f"api{n}"} for n in range(len(urls))]
    path = folder / "routes.json"
    path.write_text(json.dumps({"routes": {"chat": to(BIG, fallbacks=fallbacks)}, "externals": externals}))
    return str(path)


async def ask(stack: GatewayStack, **fields: Any) -> Any:
    body = {"model": "chat", "messages": [{"role": "user", "content": "hi"}], **fields}
    return await stack.http.post("/v1/chat/completions", json=body)


async def test_external_model_answers_last_whole_and_streamed(tmp_path: Path) -> None:
    keys = [{"key_sha256": digest_of("k"), "name": "acme", "models": ["chat"]}]
    async with elsewhere() as (api, url):
        settings = {"routes_file": file(tmp_path, url), "tenancy": True, "api_keys": json.dumps(keys)}
        settings |= {"resume_deadline_s": 0.5}
        async with running_stack([Worker("w0", model=BIG)], **settings) as stack:
            stack.http.headers["authorization"] = "Bearer k"
            assert (await ask(stack, max_tokens=2)).json()["model"] == BIG
            assert not api.bodies
            await stack.workers[0].stop()
            answer = await ask(stack, temperature=0.5, keep_alive="1h")
            assert (answer.status_code, answer.json()["model"], answer.json()["usage"]) == (200, "other0", USAGE)
            assert answer.headers["x-ryzanstein-target"] == answer.headers["x-ryzanstein-fallback-model"] == "other0"
            assert api.bodies == [
                {"model": "other0", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5}
            ]
            assert api.keys == ["Bearer secret of the API"], "and not that of the client"
            stream = await ask(stack, stream=True)
            events = [json.loads(line[6:]) for line in stream.text.split("\n") if line.startswith("data: {")]
            assert [event["choices"][0]["delta"]["content"] for event in events] == ["from ", "elsewhere"]
            assert {event["model"] for event in events} == {"other0"}
            assert stream.text.endswith("data: [DONE]\n\n")
            sent = await ask(stack, stream=True, stream_options={"include_usage": True})
            assert json.loads(sent.text.split("\n")[-5][6:])["usage"] == USAGE
            assert (await scrape(stack))["routed_requests_total", "other0", "chat"] == 3
            responses = await stack.http.post("/v1/responses", json={"model": "chat", "input": "hi"})
            assert responses.status_code == 503, "an API without external models has the error of the last one here"


async def test_usage_of_an_external_model_counts_for_the_tenant_under_its_name_in_the_route(tmp_path: Path) -> None:
    keys = [{"key_sha256": digest_of("k"), "name": "acme"}]
    with running_redis(tmp_path) as redis:
        async with elsewhere() as (_, url):
            settings = {"routes_file": file(tmp_path, url), "tenancy": True, "api_keys": json.dumps(keys)}
            async with running_stack([], redis_url=redis.url, **settings) as stack:
                stack.http.headers["authorization"] = "Bearer k"
                for stream in (False, True):
                    assert (await ask(stack, stream=stream)).status_code == 200
                used = sums(await read(stack.http, key="k", group_by=["model"]), "model")
    assert used == {("other0",): Counter(input_tokens=14, output_tokens=4, num_model_requests=2)}


@pytest.mark.parametrize("fault", ["down", "redirect"])
async def test_next_external_model_answers_when_one_fails(tmp_path: Path, fault: str) -> None:
    async with elsewhere() as (first, url), elsewhere() as (second, other):
        routes = file(tmp_path, url, other)
        async with running_stack([], routes_file=routes) as stack:
            first.fault = fault
            assert (await ask(stack)).json()["model"] == "other1"
            second.fault = fault
            failed = await ask(stack)
            assert (failed.status_code, failed.json()["error"]["code"]) == (502, "external_failed")
            assert "secret" not in failed.text
            first.fault = second.fault = "refuse"
            refused = await ask(stack)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "external_refused")
            assert "it is refuse" in refused.text
            first.fault = "break"
            broken = await ask(stack, stream=True)
            assert '"code":"external_failed"' in broken.text
            (tmp_path / "key").unlink()
            assert "its key cannot be read" in (await ask(stack)).json()["error"]["message"]


def test_key_of_an_external_api_is_read_for_each_request_from_its_file_or_its_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    of_file = External(base_url="https://a/v1", key_file=str(file))
    of_variable = External(base_url="https://a/v1", key_env="OTHER_KEY")
    for key in ("old", "new"):
        file.write_text(f"{key}\n")
        monkeypatch.setenv("OTHER_KEY", key)
        assert of_file.headers() == of_variable.headers() == {"authorization": f"Bearer {key}"}
    assert External(base_url="https://a/v1").headers() == {}
