"""The official client against the real system: embeddings and retries; more is in first light and in the clients."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from operator import mul
from typing import Any

import openai
import psutil
import pytest

from tests.stack import RunningStack

MODEL = "ryzanstein-tiny"
PROMPT = "def read(path):\n    with open("


@pytest.fixture
async def client(stack: RunningStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


async def test_embeddings(client: openai.AsyncOpenAI) -> None:
    texts = ["def add(a, b):\n    return a + b", "def add(x, y):\n    return x + y", "import os\nimport sys\n"]
    answer = await client.embeddings.create(model=MODEL, input=texts)  # in base64, which the client decodes
    plain = await client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    vectors = [item.embedding for item in answer.data]
    assert [item.index for item in answer.data] == [0, 1, 2]
    assert len({len(vector) for vector in vectors}) == 1
    for vector, same in zip(vectors, plain.data, strict=True):
        assert vector == pytest.approx(same.embedding, rel=1e-2, abs=1e-4)
    assert math.dist(vectors[0], vectors[1]) < math.dist(vectors[0], vectors[2])
    assert answer.usage.prompt_tokens > 0
    ranked: Any = await client.post(
        "/rerank", body={"model": MODEL, "query": texts[0], "documents": texts[1:]}, cast_to=object
    )
    assert [item["index"] for item in ranked["results"]] == [0, 1]
    for item in ranked["results"]:
        cosine = sum(map(mul, vectors[0], vectors[item["index"] + 1]))  # unit vectors: the dot product is the cosine
        assert item["relevance_score"] == pytest.approx(cosine, abs=2e-3)


async def test_retries_outlast_the_gateways_death(stack: RunningStack) -> None:
    """The supervisor starts another one: what others ask of the same installation is answered."""
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=20) as client:
        ask = {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        before = await client.completions.create(**ask)
        gateway = psutil.Process(stack.pid_of("gateway"))
        gateway.kill()
        gateway.wait(10)
        with pytest.raises(openai.APIConnectionError):
            await client.with_options(max_retries=0).completions.create(**ask)
        after = await client.completions.create(**ask)
        assert after.choices[0].text == before.choices[0].text
