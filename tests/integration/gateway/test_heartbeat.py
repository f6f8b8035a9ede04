"""A silent stream is kept alive by comments, which no client takes for an answer."""

from __future__ import annotations

import asyncio
import json

from tests.integration.gateway.fleet import MODEL, Fault, Worker
from tests.integration.gateway.gateways import eventually, running_stack

STREAM = {"prompt": "a", "max_tokens": 4, "stream": True, "seed": 1}


async def test_comments_come_before_the_first_token_and_between_tokens() -> None:
    async with running_stack([Worker("w0", step_s=0.5)], sse_heartbeat_s=0.1) as stack:
        async with stack.http.stream("POST", "/v1/completions", json=STREAM) as response:
            lines = [line async for line in response.aiter_lines() if line]
        stack.workers[0].step_s = 0.15
        comments = [position for position, line in enumerate(lines) if line.startswith(":")]
        assert len(comments) >= 4 * 2
        assert comments[0] == 0
        assert lines[-1] == "data: [DONE]"
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        whole = (await stack.complete(**STREAM | {"stream": False})).json()["choices"][0]["text"]
        assert "".join(event["choices"][0]["text"] for event in events) == whole
        stream = await stack.client.completions.create(model=MODEL, **STREAM)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole, "OpenAI's client ignores comments"


async def test_tokens_that_come_in_time_need_no_comment() -> None:
    async with (
        running_stack([Worker("w0", step_s=0.1)], sse_heartbeat_s=2.0) as stack,
        stack.http.stream("POST", "/v1/completions", json=STREAM | {"max_tokens": 30}) as response,
    ):
        assert not [line async for line in response.aiter_lines() if line.startswith(":")]


async def test_a_failure_has_its_status_until_the_first_comment_and_is_an_event_after_it() -> None:
    async with running_stack([Worker("w0")], sse_heartbeat_s=60) as stack:
        stack.router.empty = True
        assert (await stack.http.post("/v1/completions", json=STREAM)).status_code == 503
    async with running_stack([Worker("w0", step_s=1.0, faults=[Fault("refuse", 0)])], sse_heartbeat_s=0.1) as stack:
        late = await stack.http.post("/v1/completions", json=STREAM)
        assert late.status_code == 200
        comment, *_, error, done = [line for line in late.text.splitlines() if line]
        assert (comment[0], done) == (":", "data: [DONE]")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"


async def test_a_stream_that_has_only_sent_comments_can_still_fall_back() -> None:
    silent, other = Worker("w0", faults=[Fault("stall", 0)]), Worker("w1", model="other")
    options = {
        "sse_heartbeat_s": 0.1,
        "fallback_model": "other",
        "first_token_timeout_s": 0.5,
        "resume_deadline_s": 0.1,
    }
    async with running_stack([silent, other], **options) as stack:
        answering = asyncio.create_task(stack.http.post("/v1/completions", json=STREAM | {"model": MODEL}))
        await eventually(lambda: silent.submits)
        stack.router.away = {"w0"}
        comment, *events, done = [line for line in (await answering).text.splitlines() if line]
        assert (comment[0], done) == (":", "data: [DONE]")
        models = {json.loads(line.removeprefix("data: "))["model"] for line in events if line[0] != ":"}
        assert models == {"other"}
