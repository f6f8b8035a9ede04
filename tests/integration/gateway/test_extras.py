"""Logprobs, echo, token ids, embeddings, tokenization, sessions and the sampling extensions."""

from __future__ import annotations

import base64
import json
import struct

import pytest
from ryzanstein.v1 import worker_pb2

from services.common.blockhash import wire_chain
from services.gateway.api.schema import MAX_TEXTS
from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

PROMPT = "The quick brown fox jumps"
COMPARING: tuple[tuple[str, dict[str, object]], ...] = (
    ("/v1/embeddings", {"input": "a"}),
    ("/v1/score", {"text_1": "a", "text_2": "b"}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
)


def last_submit(stack: GatewayStack) -> worker_pb2.Submit:
    return stack.workers[0].submits[-1]


async def test_temperature_zero_and_defaults(stack: GatewayStack) -> None:
    await stack.complete(prompt=PROMPT, temperature=0)
    assert last_submit(stack).sampling.temperature == 0
    await stack.complete(prompt=PROMPT, top_k=-1)
    sampling = last_submit(stack).sampling
    assert (sampling.temperature, sampling.top_k, sampling.max_tokens) == (1.0, 0, 16)
    assert not sampling.HasField("logprobs")


async def test_recommended_sampling_of_the_model_is_the_default() -> None:
    recommended = worker_pb2.SamplingDefaults(temperature=0.7, top_p=0.25, top_k=7, repetition_penalty=1.5)
    async with running_stack([Worker("w0", sampling=recommended)]) as stack:
        messages = [{"role": "user", "content": "hi"}]
        await stack.client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
        got = last_submit(stack).sampling
        assert (got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.25, 7, 0, 1.5)
        reported = await stack.client.responses.create(model=MODEL, input="hi", max_output_tokens=1, store=False)
        assert (reported.temperature, reported.top_p) == (0.7, 0.25), "as it was written, though it travels as float32"
        assert got.temperature == last_submit(stack).sampling.temperature == pytest.approx(0.7)
        await stack.complete(prompt=PROMPT, temperature=0, top_p=1, top_k=0, repetition_penalty=1)
        got = last_submit(stack).sampling
        assert (got.temperature, got.top_p, got.top_k, got.repetition_penalty) == (0, 1, 0, 1)


async def test_tiny_top_p_keeps_the_likeliest_token(stack: GatewayStack) -> None:
    """float32 makes 0 of the smallest numbers, and workers read 0 as off."""
    for top_p in (0, 1e-46, 1e-30):
        assert (await stack.complete(prompt=PROMPT, top_p=top_p, top_k=5)).status_code == 200
        assert (last_submit(stack).sampling.top_p, last_submit(stack).sampling.top_k) == (1, 1)


@pytest.mark.parametrize("include", [False, True])
async def test_logprobs_cover_only_the_text_before_a_stop_string(stack: GatewayStack, include: bool) -> None:
    ask = {"prompt": PROMPT, "seed": 3, "max_tokens": 30, "logprobs": 0, "include_stop_str_in_output": include}
    whole = (await stack.complete(**ask)).json()["choices"][0]
    offsets = [*whole["logprobs"]["text_offset"], len(whole["text"])]
    for first in range(4, 20):
        start, end = offsets[first], offsets[first + 2]
        stop = whole["text"][start:end]  # a stop text that spans two tokens
        if end - start < 3 or "\ufffd" in stop or whole["text"].find(stop) != start:
            continue
        cut = (await stack.complete(**ask, stop=stop)).json()["choices"][0]
        assert cut["text"] == whole["text"][: end if include else start]
        stored = sum(offset < len(cut["text"]) for offset in whole["logprobs"]["text_offset"])
        assert cut["logprobs"]["tokens"] == whole["logprobs"]["tokens"][:stored]
        return
    raise AssertionError("no stop string of two tokens in this text")


async def test_logprobs_have_no_token_that_is_not_in_the_text(stack: GatewayStack) -> None:
    stack.workers[0].end_at = 3
    ask = {"prompt": PROMPT, "seed": 2, "max_tokens": 9, "logprobs": 0, "skip_special_tokens": False}
    assert len((await stack.complete(**ask)).json()["choices"][0]["logprobs"]["tokens"]) == 3
    shown = (await stack.complete(**ask, include_stop_str_in_output=True)).json()["choices"][0]
    assert len(shown["logprobs"]["tokens"]) == 4


async def test_chat_without_a_limit_may_fill_the_context(stack: GatewayStack) -> None:
    await stack.client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    submit = last_submit(stack)
    assert submit.sampling.max_tokens == 256 - len(submit.prompt_ids)


async def test_chat_logprobs(stack: GatewayStack) -> None:
    answer = await stack.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], seed=1, max_tokens=5, logprobs=True, top_logprobs=2
    )
    choice = answer.choices[0]
    content = choice.logprobs.content
    assert len(content) == 5
    assert all(len(token.top_logprobs) == 2 for token in content)
    joined = b"".join(bytes(token.bytes) for token in content)
    assert joined.decode("utf-8", errors="replace") == choice.message.content


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_scoring_a_prompt_as_evaluation_harnesses_do(stack: GatewayStack, max_tokens: int) -> None:
    ids = byte_level().encode(PROMPT).ids
    answer = await stack.complete(prompt=[ids, ids[:3]], max_tokens=max_tokens, logprobs=1, echo=True, seed=1)
    assert answer.status_code == 200, answer.text
    first, second = answer.json()["choices"]
    assert first["text"].startswith(PROMPT)
    for choice, prompt in ((first, ids), (second, ids[:3])):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + max_tokens
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1 : len(prompt)] == pytest.approx([-t / 1000 for t in prompt[1:]], rel=1e-5)
        assert "".join(logprobs["tokens"][: len(prompt)]) == byte_level().decode(prompt)
    assert answer.json()["usage"]["completion_tokens"] == 2 * max_tokens
    assert last_submit(stack).sampling.max_tokens == 1


async def test_echo_streams_the_prompt_first(stack: GatewayStack) -> None:
    ask = {"model": MODEL, "prompt": PROMPT, "seed": 4, "max_tokens": 5, "echo": True}
    whole = (await stack.client.completions.create(**ask)).choices[0].text
    chunks = [c.choices[0].text async for c in await stack.client.completions.create(**ask, stream=True)]
    assert chunks[0] == PROMPT
    assert "".join(chunks) == whole
    ask["max_tokens"] = 0
    alone = [c.choices[0] async for c in await stack.client.completions.create(**ask, stream=True)]
    assert ("".join(choice.text for choice in alone), alone[-1].finish_reason) == (PROMPT, "length")


async def test_a_stream_may_carry_its_usage_all_along(stack: GatewayStack) -> None:
    options = {"continuous_usage_stats": True}
    ask = {"model": MODEL, "max_tokens": 4, "seed": 1, "stream": True, "stream_options": options}
    hello = [{"role": "user", "content": "hi"}]
    for chunks in (
        [c async for c in await stack.client.completions.create(prompt=PROMPT, **ask)],
        [c async for c in await stack.client.chat.completions.create(messages=hello, **ask)],
    ):
        counts = [chunk.usage.completion_tokens for chunk in chunks]
        assert all(chunk.usage.prompt_tokens for chunk in chunks)
        assert counts == sorted(counts)
        assert counts[-1] == 4
        assert chunks[-1].choices, "the whole usage was not asked for"


async def test_streamed_token_ids_begin_with_the_prompts(stack: GatewayStack) -> None:
    body = {"prompt": PROMPT, "max_tokens": 3, "seed": 1, "return_token_ids": True}
    whole = (await stack.complete(**body)).json()["choices"][0]
    lines = (await stack.complete(**body, stream=True)).text.split("\n\n")[:-2]
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert choices[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == whole["token_ids"]


async def test_prompt_logprobs_in_vllms_shape(stack: GatewayStack) -> None:
    answer = await stack.complete(prompt=PROMPT, prompt_logprobs=1, max_tokens=1)
    ids = byte_level().encode(PROMPT).ids
    scored = answer.json()["choices"][0]["prompt_logprobs"]
    assert scored[0] is None
    assert [next(iter(entry)) for entry in scored[1:]] == [str(token_id) for token_id in ids[1:]]


async def test_the_session_comes_from_header_field_or_user(stack: GatewayStack) -> None:
    for headers, fields, session in (
        ({"x-session-id": "h"}, {"session_id": "s", "user": "u"}, "h"),
        ({}, {"session_id": "s", "user": "u"}, "s"),
        ({}, {"user": "u"}, "u"),
        ({}, {}, ""),
    ):
        body = {"prompt": PROMPT, "max_tokens": 1, **fields}
        assert (await stack.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
        assert stack.router.routes[-1].session == session
    for path, body in COMPARING:
        for headers, session in (({"x-session-id": "h"}, "h"), ({}, "u")):
            assert (await stack.http.post(path, json=body | {"user": "u"}, headers=headers)).status_code == 200
            assert stack.router.routes[-1].session == session, path


async def test_a_session_is_bounded_in_the_header_as_in_the_body(stack: GatewayStack) -> None:
    long = "s" * 513
    for headers, fields, param in (
        ({"x-session-id": long}, {}, "x-session-id"),
        ({}, {"session_id": long}, "session_id"),
    ):
        answer = await stack.http.post("/v1/completions", json={"prompt": PROMPT, **fields}, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert "512" in answer.json()["error"]["message"]
    for path, body in COMPARING:
        answer = await stack.http.post(path, json=body, headers={"x-session-id": long})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-session-id"), path


async def test_the_router_hears_the_prompts_blocks(stack: GatewayStack) -> None:
    prompt = PROMPT * 4
    await stack.complete(prompt=prompt, max_tokens=3)
    ids = byte_level().encode(prompt).ids
    route = stack.router.routes[-1]
    assert list(route.block_hashes) == wire_chain(f"{MODEL}-root", "", ids)
    assert (route.prompt_tokens, route.max_tokens, route.model) == (len(ids), 3, MODEL)


async def test_embeddings_as_floats_and_as_base64(stack: GatewayStack) -> None:
    inputs = ["first", "second text"]
    plain = await stack.client.embeddings.create(model=MODEL, input=inputs, encoding_format="float")
    coded = await stack.http.post("/v1/embeddings", json={"input": inputs, "encoding_format": "base64"})
    expected = [
        [float(len(ids)), float(sum(ids) % 97), 0.5, -1.0] for ids in (byte_level().encode(t).ids for t in inputs)
    ]
    assert [item.embedding for item in plain.data] == expected
    vectors = [list(struct.unpack("<4f", base64.b64decode(item["embedding"]))) for item in coded.json()["data"]]
    assert vectors == expected
    by_ids = await stack.client.embeddings.create(model=MODEL, input=byte_level().encode("first").ids)
    assert by_ids.data[0].embedding == expected[0]
    assert plain.usage.prompt_tokens == sum(len(byte_level().encode(t).ids) for t in inputs)


async def test_bad_embedding_requests(stack: GatewayStack) -> None:
    for body, param in (
        ({"input": []}, "input"),
        ({"input": ["a"] * (MAX_TEXTS + 1)}, "input"),
        ({"input": "a " * 400}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
    ):
        answer = await stack.http.post("/v1/embeddings", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tokenize_and_detokenize(stack: GatewayStack) -> None:
    answer = (await stack.http.post("/tokenize", json={"prompt": PROMPT, "return_token_strs": True})).json()
    ids = byte_level().encode(PROMPT).ids
    assert (answer["tokens"], answer["count"], answer["max_model_len"]) == (ids, len(ids), 256)
    assert len(answer["token_strs"]) == len(ids)
    back = await stack.http.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": PROMPT}
    chat = await stack.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})
    text = (await stack.http.post("/detokenize", json={"tokens": chat.json()["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (await stack.http.post("/tokenize", json={})).status_code == 400
    useless = await stack.http.post("/tokenize", json={"prompt": PROMPT, "add_generation_prompt": True})
    assert (useless.status_code, useless.json()["error"]["param"]) == (400, "add_generation_prompt")


async def test_a_stop_token_is_not_text_unless_asked_for(stack: GatewayStack) -> None:
    stack.workers[0].end_at = 3
    ask = {"prompt": PROMPT, "seed": 2, "max_tokens": 9, "skip_special_tokens": False}
    without = (await stack.complete(**ask)).json()["choices"][0]["text"]
    with_it = (await stack.complete(**ask, include_stop_str_in_output=True)).json()["choices"][0]["text"]
    assert with_it == without + "<|eos|>"


async def test_min_tokens_also_holds_stop_strings_off(stack: GatewayStack) -> None:
    full = (await stack.complete(prompt=PROMPT, seed=6, max_tokens=20)).json()["choices"][0]["text"]
    body = {"prompt": PROMPT, "seed": 6, "max_tokens": 20, "stop": full[0]}
    assert (await stack.complete(**body)).json()["usage"]["completion_tokens"] < 20
    later = (await stack.complete(**body, min_tokens=10)).json()
    assert later["usage"]["completion_tokens"] > 10
    assert len(later["choices"][0]["text"]) > 0
