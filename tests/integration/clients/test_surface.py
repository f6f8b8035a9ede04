"""Every client has the same calls, results and errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from ryzanstein_client import (
    BadRequest,
    Message,
    Model,
    NotFound,
    RateLimited,
    RetryPolicy,
    ServerError,
    StreamInterrupted,
    TimedOut,
    Tool,
    Unauthorized,
    Unavailable,
)

from services.gateway.tenants.keys import digest_of
from tests.integration.clients.serving import (
    ALL,
    DIRECT,
    PROMPT,
    Served,
    call,
    expected_ids,
    expected_text,
    read,
    served,
    spelled,
)
from tests.integration.gateway.fleet import MAX_LEN, MODEL, Fault, Worker
from tests.integration.gateway.gateways import eventually
from tests.unit.gateway.made_tokenizers import byte_level

TALK = [Message("system", "Be brief."), Message("user", "naïve 🙂?")]
ONCE = replace(DIRECT, retries=RetryPolicy(max_retries=0))
SOON = replace(DIRECT, retries=RetryPolicy(max_retries=8, first_pause_s=0.1))

every_client = pytest.mark.parametrize("kind", ALL)
# A blocking client is made of the other one: what only fields differ in is tried with one of each protocol.
both_protocols = pytest.mark.parametrize("kind", ["rest", "grpc-async"])


@pytest.fixture
async def gateway() -> AsyncIterator[Served]:
    async with served() as running:
        yield running


@every_client
async def test_whole_and_streamed_generations_are_the_tokens(gateway: Served, kind: str) -> None:
    async with gateway.client(kind) as client:
        whole = await call(client, "complete", PROMPT, seed=5, max_tokens=30)
        assert whole.text == expected_text(5, 30)
        assert whole.finish_reason == "length"
        prompt_ids = byte_level().encode(PROMPT).ids
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt_ids), 30)
        gateway.stack.workers[0].step_s = 0.02  # faster tokens travel together
        chunks = await read(client, "stream_completion", prompt_ids, seed=5, max_tokens=30, model=MODEL)
        gateway.stack.workers[0].step_s = 0.0
        assert "".join(chunk.text for chunk in chunks) == whole.text
        assert len(chunks) > 1
        assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason or chunk.usage] == ["length"]
        assert chunks[-1].usage == whole.usage
        if kind.startswith("grpc"):
            assert whole.token_ids == expected_ids(5, 30)
        talked = await call(client, "chat", TALK, seed=6, max_tokens=20)
        pieces = await read(client, "stream_chat", TALK, seed=6, max_tokens=20)
        assert "".join(piece.text for piece in pieces) == talked.text
        assert pieces[-1].usage == talked.usage
        assert talked.usage.completion_tokens == 20


@both_protocols
async def test_predictions_are_sent_and_their_counts_read(gateway: Served, kind: str) -> None:
    gateway.stack.workers[0].sizes = (1, 3)
    async with gateway.client(kind) as client:
        for whole, streamed, request in (("complete", "stream_completion", PROMPT), ("chat", "stream_chat", TALK)):
            used = (await call(client, whole, request, max_tokens=8, prediction="a list")).usage
            assert (used.accepted_prediction_tokens, used.rejected_prediction_tokens) == (4, 12)
            chunks = await read(client, streamed, request, max_tokens=8, prediction="a list")
            assert chunks[-1].usage == used
    for submit in gateway.stack.workers[0].submits:
        assert byte_level().decode(list(submit.prediction_ids)) == "a list"


@both_protocols
async def test_structured_output_is_asked_for(gateway: Served, kind: str) -> None:
    async with gateway.client(kind) as client:
        for request in (
            {"json": {"type": "integer"}},
            {"regex": "[a-f]+"},
            {"choice": ["a", "b"]},
            {"json_object": True},
        ):
            await call(client, "complete", PROMPT, max_tokens=2, structured_outputs=request)
            submit = [submit for worker in gateway.stack.workers for submit in worker.submits][-1]
            assert submit.sampling.grammar, request
        never = {"name": "n", "strict": True, "schema": {"uniqueItems": True}}
        strict = {"type": "json_schema", "json_schema": never}
        with pytest.raises(BadRequest, match="uniqueItems") as refused:
            await call(client, "chat", TALK, response_format=strict)
        assert refused.value.param == "response_format.json_schema.schema"


@both_protocols
async def test_tools_calls_and_their_results(kind: str) -> None:
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    count = len(byte_level().encode(text).ids)
    tools: list[Tool] = [{"name": "get_weather", "parameters": {"type": "object"}}, {"name": "now"}]
    async with served([spelled(text)]) as gateway, gateway.client(kind) as client:
        ask = {"max_tokens": count, "tools": tools, "tool_choice": "auto"}
        whole = await call(client, "chat", TALK, **ask)
        (made,) = whole.tool_calls
        assert (made.name, json.loads(made.arguments), whole.text) == ("get_weather", {"city": "Rome"}, "")
        chunks = await read(client, "stream_chat", TALK, **ask)
        assert "".join(piece.arguments for chunk in chunks for piece in chunk.tool_calls) == made.arguments
        history = [
            *TALK,
            Message("assistant", tool_calls=whole.tool_calls),
            Message("tool", "21", tool_call_id=made.id),
        ]
        submits = gateway.stack.workers[0].submits
        await call(client, "chat", history, **ask)
        assert "get_weather" in byte_level().decode(list(submits[-1].prompt_ids))
        await call(client, "chat", TALK, **{**ask, "tool_choice": "get_weather", "parallel_tool_calls": False})
        assert submits[-1].sampling.grammar
        with pytest.raises(TypeError, match="CompletionOptions has no tools"):
            await call(client, "complete", PROMPT, tools=tools)


@both_protocols
async def test_template_fields_reach_the_template_and_echo_returns_the_prompt(kind: str) -> None:
    template = (
        "{{ reasoning_effort }}{{ tone }}{% for m in messages %}{{ m.name }}{{ m.reasoning_content }}{{ m.content }}"
        "{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
    )
    async with served([Worker("w0", template=template)]) as gateway, gateway.client(kind) as client:
        reported = [Message("user", "hi", name="Ada"), Message("assistant", "ho", reasoning="hm")]
        submits = gateway.stack.workers[0].submits
        variables = {"reasoning_effort": "low", "chat_template_kwargs": {"tone": "dry"}}
        await call(client, "chat", reported, max_tokens=1, response_format={"type": "json_object"}, **variables)
        assert byte_level().decode(list(submits[-1].prompt_ids)) == "lowdryAdahihmhoA:"
        assert submits[-1].sampling.grammar
        named = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"uniqueItems": True}}}
        with pytest.raises(BadRequest, match="uniqueItems"):
            await call(client, "chat", reported, response_format=named)
        await call(client, "chat", reported, max_tokens=1, add_generation_prompt=False, continue_final_message=True)
        assert byte_level().decode(list(submits[-1].prompt_ids)) == "Adahihmho"
        plain = await call(client, "complete", PROMPT, seed=1, max_tokens=5, logprobs=1)
        echoed = await call(client, "complete", PROMPT, seed=1, max_tokens=5, logprobs=1, echo=True)
        assert echoed.text == PROMPT + plain.text
        assert len(echoed.logprobs) == plain.usage.prompt_tokens - 1 + 5
        chunks = await read(client, "stream_completion", PROMPT, seed=1, max_tokens=5, logprobs=1, echo=True)
        assert "".join(chunk.text for chunk in chunks) == echoed.text
        assert tuple(token for chunk in chunks for token in chunk.logprobs) == echoed.logprobs
        with pytest.raises(TypeError, match="ChatOptions has no echo"):
            await call(client, "chat", reported, echo=True)


@both_protocols
async def test_logprobs_are_the_same_whole_and_streamed(gateway: Served, kind: str) -> None:
    async with gateway.client(kind) as client:
        for whole_call, stream_call, request in (
            ("complete", "stream_completion", PROMPT),
            ("chat", "stream_chat", TALK),
        ):
            options = {"seed": 3, "max_tokens": 6, "logprobs": 2}
            whole = await call(client, whole_call, request, **options)
            chunks = await read(client, stream_call, request, **options)
            assert tuple(token for chunk in chunks for token in chunk.logprobs) == whole.logprobs
            assert len(whole.logprobs) == 6
            for token in whole.logprobs:
                assert token.logprob < 0
                assert len(token.top) >= 2
                assert (token.token_id if kind.startswith("grpc") else token.text) is not None


@both_protocols
async def test_embeddings_tokens_and_models(gateway: Served, kind: str) -> None:
    async with gateway.client(kind) as client:
        ids = [byte_level().encode(text).ids for text in ("first", "second text")]
        actual = await call(client, "embed", ["first", "second text"])
        assert actual.vectors == tuple((float(len(i)), float(sum(i) % 97), 0.5, -1.0) for i in ids)
        assert actual.usage.prompt_tokens == sum(map(len, ids))
        assert (await call(client, "embed", "first")).vectors == actual.vectors[:1]
        assert await call(client, "tokenize", PROMPT) == tuple(byte_level().encode(PROMPT).ids)
        assert await call(client, "detokenize", ids[1]) == "second text"
        assert await call(client, "models") == (Model(MODEL, 1_700_000_000, MAX_LEN),)


@both_protocols
async def test_results_name_the_model_that_answers(kind: str) -> None:
    workers = [Worker("w0"), Worker("w1", model="other")]
    async with served(workers, fallback_model="other") as gateway, gateway.client(kind) as client:
        for answering in (MODEL, "other"):
            assert (await call(client, "complete", PROMPT, model=MODEL, max_tokens=2)).model == answering
            chunks = await read(client, "stream_chat", TALK, model=MODEL, max_tokens=2)
            assert {chunk.model for chunk in chunks} == {answering}
            gateway.stack.router.away = {"w0"}


@both_protocols
async def test_every_option_reaches_the_worker(gateway: Served, kind: str) -> None:
    options = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.5, "top_p": 0.75, "top_k": 7, "min_p": 0.125,
        "presence_penalty": 0.25, "frequency_penalty": -0.5, "repetition_penalty": 1.25, "logit_bias": {5: -100.0},
        "seed": -3, "stop": "zzz", "stop_token_ids": [17], "ignore_eos": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "session_id": "s", "priority": 3,
    }  # fmt: skip
    async with gateway.client(kind) as client:
        for method, request in (("complete", PROMPT), ("chat", TALK)):
            await call(client, method, request, **options)
            submit = gateway.stack.workers[0].submits[-1]
            names = options.keys() - {
                "include_stop_str_in_output",
                "skip_special_tokens",
                "seed",
                "stop",
                "stop_token_ids",
                "logit_bias",
                "session_id",
                "priority",
            }
            assert {name: getattr(submit.sampling, name) for name in names} == {name: options[name] for name in names}
            assert submit.sampling.seed == 2**64 - 3
            assert dict(submit.sampling.logit_bias) == {5: -100.0}
            assert list(submit.sampling.stop_token_ids) == [17]
            assert submit.priority == 3
            assert gateway.stack.router.routes[-1].session == "s"


@both_protocols
async def test_sessions_come_from_the_client_or_the_call(gateway: Served, kind: str) -> None:
    async with gateway.client(kind, replace(DIRECT, session_id="mine")) as client:
        await call(client, "complete", PROMPT, max_tokens=1)
        assert gateway.stack.router.routes[-1].session == "mine"
        await read(client, "stream_chat", TALK, max_tokens=1, session_id="other")
        assert gateway.stack.router.routes[-1].session == "other"


@every_client
async def test_refusals_are_typed(gateway: Served, kind: str) -> None:
    async with gateway.client(kind, ONCE) as client:
        with pytest.raises(BadRequest, match="temperature") as bad:
            await call(client, "complete", PROMPT, temperature=-1)
        assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
        with pytest.raises(BadRequest, match="max_tokens"):
            await read(client, "stream_completion", PROMPT, max_tokens=-1 if kind.startswith("rest") else 0)
        for method, request in (("complete", PROMPT), ("embed", "x"), ("tokenize", "x"), ("detokenize", [9])):
            with pytest.raises(NotFound, match="nope"):
                await call(client, method, request, model="nope")
        with pytest.raises(NotFound, match="nope"):
            await read(client, "stream_chat", TALK, model="nope")
        gateway.stack.router.busy = True
        with pytest.raises(RateLimited) as busy:
            await call(client, "complete", PROMPT)
        assert busy.value.retry_after == 7
        with pytest.raises(RateLimited):
            await read(client, "stream_completion", PROMPT)
        gateway.stack.router.busy = False
        gateway.stack.router.hidden = {"w0"}
        await eventually(lambda: not gateway.stack.gateway.catalog.available())
        with pytest.raises(Unavailable) as away:
            await call(client, "chat", TALK)
        assert away.value.retry_after is not None


@both_protocols
async def test_keys(kind: str) -> None:
    entry = {"key_sha256": digest_of("secret"), "name": "acme"}
    async with served(tenancy=True, api_keys=json.dumps([entry])) as gateway:
        async with gateway.client(kind, replace(ONCE, api_key="secret")) as client:
            assert (await call(client, "complete", PROMPT, max_tokens=2)).usage.completion_tokens == 2
            assert await read(client, "stream_completion", PROMPT, max_tokens=2)
        async with gateway.client(kind, ONCE) as client:
            for method in ("complete", "tokenize"):
                with pytest.raises(Unauthorized):
                    await call(client, method, PROMPT)


@every_client
async def test_a_connection_lost_before_the_answer_is_not_the_callers_business(gateway: Served, kind: str) -> None:
    network = gateway.network(kind)
    async with gateway.client(kind, SOON) as client:
        network.cuts = [0, 0]
        assert (await call(client, "complete", PROMPT, seed=1, max_tokens=5)).text == expected_text(1, 5)
        assert network.connections == 3
        network.lose_all()
        chunks = await read(client, "stream_completion", PROMPT, seed=1, max_tokens=5)
        assert "".join(chunk.text for chunk in chunks) == expected_text(1, 5)


@every_client
async def test_a_server_that_stays_away_is_unavailable(gateway: Served, kind: str) -> None:
    network = gateway.network(kind)
    patience = replace(DIRECT, retries=RetryPolicy(max_retries=2, first_pause_s=0.05))
    async with gateway.client(kind, patience) as client:
        network.cuts = [0] * 50
        with pytest.raises(Unavailable):
            await call(client, "complete", PROMPT)
        with pytest.raises(Unavailable):
            await read(client, "stream_completion", PROMPT)


@both_protocols
async def test_request_past_the_servers_limit_is_not_tried_again(kind: str) -> None:
    async with (
        served([Worker("w0", prefill_s=60.0)], request_timeout_s=2.0) as gateway,
        gateway.client(kind, SOON) as client,
    ):
        with pytest.raises(ServerError if kind.startswith("rest") else TimedOut):
            await call(client, "complete", PROMPT)
        assert len(gateway.stack.workers[0].submits) == 1


@every_client
async def test_broken_stream_error_holds_the_received_text(kind: str) -> None:
    async with served([Worker("w0", step_s=0.005)]) as gateway:
        network = gateway.network(kind)
        network.cuts = [3000]
        async with gateway.client(kind, SOON) as client:
            with pytest.raises(StreamInterrupted) as broken:
                await read(client, "stream_completion", PROMPT, seed=2, max_tokens=200)
            assert isinstance(broken.value.__cause__, Unavailable)
            assert 0 < len(broken.value.text) < len(expected_text(2, 200))
            assert expected_text(2, 200).startswith(broken.value.text)
            assert len(gateway.stack.workers[0].submits) == 1, "never tried again after the first token"


@both_protocols
async def test_a_generation_that_fails_later_keeps_its_text(kind: str) -> None:
    workers = [Worker(name, faults=[Fault("break", 3), Fault("break", 3)]) for name in ("w0", "w1")]
    async with served(workers) as gateway, gateway.client(kind) as client:
        with pytest.raises(StreamInterrupted) as broken:
            await read(client, "stream_completion", PROMPT, seed=2, max_tokens=20)
        # A character whose last byte never came is no text.
        assert broken.value.text == expected_text(2, 3).rstrip("\ufffd")


@every_client
async def test_calls_end_in_their_time(kind: str) -> None:
    settings = {"progress_timeout_s": 30}
    async with served([Worker("w0", step_s=0.15)], **settings) as gateway, gateway.client(kind, ONCE) as client:
        with pytest.raises(TimedOut):
            await call(client, "complete", PROMPT, max_tokens=50, timeout_s=0.4)
        with pytest.raises(TimedOut):
            await read(client, "stream_completion", PROMPT, max_tokens=50, timeout_s=0.05)
        with pytest.raises(StreamInterrupted) as late:
            await read(client, "stream_completion", PROMPT, max_tokens=50, timeout_s=3.0)
        assert isinstance(late.value.__cause__, TimedOut)
        assert late.value.text
        worker = gateway.stack.workers[0]
        await eventually(lambda: len(worker.cancelled) == len(worker.submits) > 0)
