"""Classifiers: labels of texts, scores of pairs that are read together, and refusals that say what a model can do."""

from __future__ import annotations

import math
from typing import Any

import pytest
from ryzanstein.v1 import worker_pb2
from tokenizers.processors import TemplateProcessing

from tests.integration.gateway.fleet import MODEL, Worker
from tests.integration.gateway.gateways import GatewayStack, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

Classes = worker_pb2.Classes
TEXTS = ["how to read", "nothing", "a"]


def card(labels: list[str], function: Classes.Function = Classes.FUNCTION_SOFTMAX) -> worker_pb2.ModelCard:
    return worker_pb2.ModelCard(only_embeds=True, classes=Classes(labels=labels, function=function))


def numbers(ids: list[int]) -> list[float]:
    """The scores that the workers here return."""
    return [float(len(ids)), float(sum(ids) % 97), 0.5, -1.0]


async def post(stack: GatewayStack, path: str, **body: Any) -> Any:
    answer = await stack.http.post(path, json={"model": MODEL, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_labels_and_scores_of_pairs() -> None:
    async with running_stack([Worker("w0", abilities=card(["none", "some", "more", "all"]))]) as stack:
        actual = await post(stack, "/v1/classify", input=TEXTS)
        for text, item in zip(TEXTS, actual["data"], strict=True):
            powers = [math.exp(number) for number in numbers(byte_level().encode(text).ids)]
            expected = [power / sum(powers) for power in powers]
            assert item["probs"] == pytest.approx(expected)
            assert (item["label"], item["num_classes"]) == (("none", "some")[expected[1] > expected[0]], 4)
        await refuses(stack, "/v1/rerank", {"query": "a", "documents": ["b"]}, "classifies with 4 labels")
    plain = card(["none", "some", "more", "all"], Classes.FUNCTION_IDENTITY)
    async with running_stack([Worker("w0", abilities=plain)]) as stack:
        (item,) = (await post(stack, "/v1/classify", input=TEXTS[0]))["data"]
        assert item["probs"] == numbers(byte_level().encode(TEXTS[0]).ids)
    tokenizer = byte_level()
    tokenizer.post_processor = TemplateProcessing(single="$A", pair="$A:0 $B:1", special_tokens=[])
    scoring = Worker("w0", tokenizer=tokenizer, abilities=card(["score"], Classes.FUNCTION_SIGMOID))
    async with running_stack([scoring]) as stack:
        query, documents = TEXTS[0], ["b", "c " * 300]
        body = {"query": query, "documents": documents, "max_tokens_per_doc": 5}
        ranked = await post(stack, "/v1/rerank", **body)
        submits = {len(submit.prompt_ids): submit for submit in stack.workers[0].submits}
        first, other = byte_level().encode(query).ids, byte_level().encode(documents[1]).ids[:5]
        assert list(submits[len(first) + 5].prompt_ids) == first + other
        assert all(submit.embed and submit.second_from == len(first) for submit in submits.values())
        scores = sorted((1 / (1 + math.exp(-float(length))) for length in submits), reverse=True)
        assert [item["relevance_score"] for item in ranked["results"]] == pytest.approx(scores)
        scored = await post(stack, "/v1/score", text_1=query, text_2="b")
        assert scored["data"][0]["score"] == pytest.approx(1 / (1 + math.exp(-len(first) - 1)))
        await refuses(stack, "/v1/embeddings", {"input": "a"}, "scores with one label")
        too_long = {"text_1": query, "text_2": ["c " * 300]}
        await refuses(stack, "/v1/score", too_long, "maximum context length", "text_2[0]")
        await refuses(stack, "/v1/score", {"text_1": query, "text_2": ["b", ""]}, "at least one token", "text_2[1]")


async def test_encoder_embeds_with_its_prompts_and_rejects_other_tasks() -> None:
    abilities = worker_pb2.ModelCard(only_embeds=True, prompts={"query": "Q: ", "plain": ""}, default_prompt="query")
    async with running_stack([Worker("w0", abilities=abilities)]) as stack:
        worker = stack.workers[0]
        for name, before in ((None, "Q: "), ("query", "Q: "), ("plain", "")):
            await post(stack, "/v1/embeddings", input="read", prompt_name=name)
            assert list(worker.submits[-1].prompt_ids) == byte_level().encode(f"{before}read").ids
        await refuses(stack, "/v1/embeddings", {"input": "a", "prompt_name": "x"}, "`plain`, `query`", "prompt_name")
        messages = [{"role": "user", "content": "hi"}]
        for path, body in (("chat/completions", {"messages": messages}), ("completions", {"prompt": "a"})):
            await refuses(stack, f"/v1/{path}", body, "cannot generate text: it embeds. Use `/v1/embeddings`")
        await refuses(stack, "/v1/classify", {"input": "a"}, "cannot classify: it embeds")


async def refuses(stack: GatewayStack, path: str, body: dict[str, Any], says: str, param: str = "model") -> None:
    answer = await stack.http.post(path, json={"model": MODEL, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param), error
    assert says in error["message"]
