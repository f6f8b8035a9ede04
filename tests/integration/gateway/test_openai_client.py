"""The official client, streaming and not."""

from __future__ import annotations

import asyncio

import openai
import pytest
from ryzanstein.v1 import routing_pb2

from tests.integration.gateway.fleet import MODEL, Worker, scripted_token
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

PROMPT = "The quick brown"


def expected_text(prompt: str, seed: int, count: int) -> str:
    tokenizer = byte_level()
    ids = tokenizer.encode(prompt).ids
    return tokenizer.decode([scripted_token(ids, seed, position) for position in range(count)])


async def test_streamed_completion_equals_the_unstreamed_completion() -> None:
    async with running_stack([Worker("w0", step_s=0.02)]) as stack:
        stream = await stack.client.completions.create(
            model=MODEL, prompt=PROMPT, seed=5, max_tokens=40, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert text == expected_text(PROMPT, 5, 40)
        assert len(chunks) > 10
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 40
        assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_chat_streamed_and_whole_are_equal(stack: GatewayStack) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "naïve 🙂?"}]
    ask = {"model": MODEL, "messages": messages, "seed": 9, "max_completion_tokens": 30}
    whole = await stack.client.chat.completions.create(**ask)
    stream = await stack.client.chat.completions.create(**ask, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    prompt = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nnaïve 🙂?<|im_end|>\n<|im_start|>assistant\n"
    assert whole.choices[0].message.content == expected_text(prompt, 9, 30)


async def test_eos_ends_a_sequence_and_is_not_text() -> None:
    async with running_stack([Worker("w0", end_at=4)]) as stack:
        answer = await stack.client.completions.create(model=MODEL, prompt=PROMPT, seed=3, max_tokens=20)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].text == expected_text(PROMPT, 3, 4)
        assert answer.usage.completion_tokens == 5


async def test_many_choices_and_prompts_keep_their_order(stack: GatewayStack) -> None:
    answer = await stack.client.completions.create(model=MODEL, prompt=["User:", "def f"], n=3, seed=20, max_tokens=6)
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert texts == [expected_text(prompt, 20 + i, 6) for prompt in ("User:", "def f") for i in range(3)]
    prompts = sum(len(byte_level().encode(prompt).ids) for prompt in ("User:", "def f"))
    assert answer.usage.prompt_tokens == prompts
    assert answer.usage.completion_tokens == 36


async def test_requests_without_a_seed_differ(stack: GatewayStack) -> None:
    answers = [await stack.client.completions.create(model=MODEL, prompt=PROMPT) for _ in range(2)]
    assert answers[0].choices[0].text != answers[1].choices[0].text


@pytest.mark.parametrize("include", [False, True])
async def test_a_stop_string_ends_the_text(include: bool) -> None:
    async with running_stack([Worker("w0", step_s=0.002)]) as stack:
        full = expected_text(PROMPT, 8, 60)
        stop = full[20:24]
        cut = full.index(stop)
        stream = await stack.client.completions.create(
            model=MODEL, prompt=PROMPT, seed=8, max_tokens=60, stop=["never there", stop], stream=True,
            extra_body={"include_stop_str_in_output": include},
        )  # fmt: skip
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks) == full[: cut + len(stop) if include else cut]
        assert chunks[-1].choices[0].finish_reason == "stop"
        await eventually(lambda: stack.workers[0].cancelled)  # the worker must not go on
        await eventually(lambda: [o.result for o in stack.router.outcomes] == [routing_pb2.Outcome.RESULT_OK])


async def test_client_retries_only_retryable_errors(stack: GatewayStack) -> None:
    client = stack.client.with_options(max_retries=3)
    stack.router.busy, stack.router.retry_after_s = True, 1
    sent = asyncio.create_task(client.completions.create(model=MODEL, prompt=PROMPT, seed=5, max_tokens=4))
    await eventually(lambda: len(stack.router.routes) == 1)
    stack.router.busy = False
    assert (await sent).choices[0].text == expected_text(PROMPT, 5, 4)
    routes = len(stack.router.routes)
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=10_000)
    assert len(stack.router.routes) == routes, "a bad request stays bad"


async def test_incomplete_character_is_streamed_as_an_empty_chunk() -> None:
    """Half of a character is nothing to show, but the stream goes on: clients that watch its pace see every token."""
    halves = [byte_level().token_to_id(half) for half in "Ã©"]  # the two bytes of an e with an acute accent
    accents = Worker("w0", token=lambda _prompt, _seed, position: halves[position % 2], step_s=0.2)
    async with running_stack([accents]) as stack:
        ask = {"model": MODEL, "max_tokens": 4, "stream": True}
        whole = await stack.client.completions.create(prompt=[5] * 6, **ask)
        assert [chunk.choices[0].text async for chunk in whole] == ["", "é", "", "é"]
        messages = [{"role": "user", "content": "hi"}]
        chat = await stack.client.chat.completions.create(messages=messages, **ask)
        pieces = [chunk.choices[0].delta.content async for chunk in chat]
    assert pieces[1:] == ["", "é", "", "é"]  # the first one says who speaks


async def test_a_models_name_may_have_slashes() -> None:
    async with running_stack([Worker("w0", model="lab/models/tiny")]) as stack:
        (listed,) = (await stack.client.models.list()).data
        assert await stack.client.models.retrieve(listed.id) == listed
        assert listed.id == "lab/models/tiny"
        with pytest.raises(openai.NotFoundError) as missing:
            await stack.client.models.retrieve("lab/other")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
