"""A silent stream is kept alive by comments, which no client takes for an answer, and at length by events."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from tests.integration.gateway.fleet import MODEL, Fault, Worker
from tests.integration.gateway.gateways import eventually, running_stack
from tests.integration.gateway.test_responses import PATH, events_of

STREAM = {"prompt": "a", "max_tokens": 4, "stream": True, "seed": 1}
RESPONSE = {"input": "a", "max_output_tokens": 2, "store": False}


async def test_comments_come_before_the_first_token_and_between_tokens() -> None:
    async with running_stack([Worker("w0", step_s=0.5)], sse_heartbeat_s=0.1) as stack:
        async with stack.http.stream("POST", "/v1/completions", json=STREAM) as response:
            text = (await response.aread()).decode()
        assert ": waiting\n\n" not in text, "an empty event to some clients"
        lines = [line for line in text.splitlines() if line]
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


async def test_failure_is_a_status_before_the_first_heartbeat_and_an_event_afterwards() -> None:
    async with running_stack([Worker("w0")], sse_heartbeat_s=60) as stack:
        stack.router.empty = True
        assert (await stack.http.post("/v1/completions", json=STREAM)).status_code == 503
    async with running_stack([Worker("w0", step_s=1.0, faults=[Fault("refuse", 0)])], sse_heartbeat_s=0.1) as stack:
        late = await stack.http.post("/v1/completions", json=STREAM)
        assert late.status_code == 200
        comment, *_, error, done = [line for line in late.text.splitlines() if line]
        assert (comment[0], done) == (":", "data: [DONE]")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"


async def streamed_past_a_silent_worker(path: str, request: dict[str, Any], sse_heartbeat_s: float) -> str:
    """The stream of a request whose worker stays silent until it is given up, while another model's worker serves."""
    silent, other = Worker("w0", faults=[Fault("stall", 0)]), Worker("w1", model="other")
    limits = {"sse_heartbeat_s": sse_heartbeat_s, "progress_timeout_s": 1.0, "resume_deadline_s": 0.1}
    async with running_stack([silent, other], fallback_model="other", **limits) as stack:
        answering = asyncio.create_task(stack.http.post(path, json=request | {"model": MODEL}))
        await eventually(lambda: silent.submits)
        stack.router.away = {"w0"}
        return (await answering).text


async def test_a_stream_that_has_only_sent_comments_can_still_fall_back() -> None:
    text = await streamed_past_a_silent_worker("/v1/completions", STREAM, sse_heartbeat_s=0.1)
    comment, *events, done = [line for line in text.splitlines() if line]
    assert (comment[0], done) == (":", "data: [DONE]")
    assert {json.loads(line.removeprefix("data: "))["model"] for line in events if line[0] != ":"} == {"other"}


async def test_a_long_silence_of_a_response_has_events_that_clients_take() -> None:
    """Codex ends a stream without events; OpenAI's clients end one that does not begin with `response.created`."""
    worker = Worker("w0", steps=asyncio.Semaphore(0))
    async with running_stack([worker], sse_heartbeat_s=0.02) as stack:
        events: list[dict[str, Any]] = []
        released = 0
        assert worker.steps
        async with stack.client.responses.stream(model="", extra_body={"seed": 1}, **RESPONSE) as stream:
            async for event in stream:
                events.append(event.to_dict())
                deltas = [one["type"] for one in events].count("response.output_text.delta")
                if event.type == "response.in_progress" and len(events) > 2 and released == deltas:
                    worker.steps.release()
                    released += 1
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[:3] == ["created", "in_progress", "in_progress"], "before the first token"
        assert kinds.count("created") == 1
        assert "in_progress" in kinds[kinds.index("output_text.delta") :], "between tokens"
        assert kinds[-1] == "incomplete"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_response_that_has_named_its_model_does_not_fall_back() -> None:
    request = {**RESPONSE, "stream": True}
    text = await streamed_past_a_silent_worker(PATH, request, sse_heartbeat_s=0.02)
    events = events_of(text)
    assert (events[0]["type"], events[-1]["type"]) == ("response.created", "response.failed")
    assert {event["response"]["model"] for event in events} == {MODEL}
