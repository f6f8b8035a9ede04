"""Scores and ranks are the cosines of what /v1/embeddings returns, in the shapes that rerankers' clients read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from tests.integration.gateway.fleet import MAX_LEN, MODEL
from tests.integration.gateway.gateways import GatewayStack
from tests.unit.gateway.made_tokenizers import byte_level

QUERY, DOCUMENTS = "how to read", ["a", "reading a file", "how to read it all, line by line", "nothing"]
LONG = "many words " * 200


def count(*texts: str) -> int:
    return sum(len(byte_level().encode(text).ids) for text in texts)


async def cosines(stack: GatewayStack, first: Sequence[str], second: Sequence[str]) -> list[float]:
    answer = await stack.client.embeddings.create(model=MODEL, input=[*first, *second], encoding_format="float")
    vectors = [item.embedding for item in answer.data]
    pairs = zip(vectors[: len(first)], vectors[len(first) :], strict=True)
    return [
        sum(a * b for a, b in zip(one, other, strict=True)) / math.hypot(*one) / math.hypot(*other)
        for one, other in pairs
    ]


async def post(stack: GatewayStack, path: str, **body: Any) -> Any:
    answer = await stack.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_score_compares_one_text_with_many_and_pairs(stack: GatewayStack) -> None:
    expected = await cosines(stack, [QUERY] * 4, DOCUMENTS)
    assert len(set(expected)) == 4
    one = await post(stack, "/v1/score", model=MODEL, text_1=QUERY, text_2=DOCUMENTS)
    assert [item["score"] for item in one["data"]] == pytest.approx(expected)
    assert [item["index"] for item in one["data"]] == [0, 1, 2, 3]
    assert one["usage"] == {"prompt_tokens": count(QUERY, *DOCUMENTS), "total_tokens": count(QUERY, *DOCUMENTS)}
    assert len(stack.workers[0].submits) == 8 + 5, "what all are compared with is embedded once"
    pairs = await post(stack, "/score", text_1=DOCUMENTS, text_2=DOCUMENTS[::-1])
    assert [item["score"] for item in pairs["data"]] == pytest.approx(await cosines(stack, DOCUMENTS, DOCUMENTS[::-1]))
    single = await post(stack, "/score", text_1=QUERY, text_2=QUERY)
    assert single["data"] == [{"index": 0, "object": "score", "score": pytest.approx(1)}]


async def test_ranks(stack: GatewayStack) -> None:
    expected = await cosines(stack, [QUERY] * 4, DOCUMENTS)
    order = sorted(range(4), key=lambda index: -expected[index])
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        ranked = await post(stack, path, model=MODEL, query=QUERY, documents=DOCUMENTS)
        assert [item["index"] for item in ranked["results"]] == order
        assert [item["relevance_score"] for item in ranked["results"]] == pytest.approx(sorted(expected)[::-1])
        assert [item["document"]["text"] for item in ranked["results"]] == [DOCUMENTS[index] for index in order]
    assert ranked["usage"]["total_tokens"] == ranked["meta"]["tokens"]["input_tokens"] == count(QUERY, *DOCUMENTS)
    documents = [{"text": text, "id": number, "metadata": {}} for number, text in enumerate(DOCUMENTS)]
    best = await post(stack, "/rerank", query=QUERY, documents=documents, top_n=2, return_documents=False)
    assert best["results"] == [{k: v for k, v in item.items() if k != "document"} for item in ranked["results"][:2]]


async def test_long_texts_keep_their_beginning_where_asked(stack: GatewayStack) -> None:
    worker = stack.workers[0]
    beginning = byte_level().encode(LONG).ids
    await post(stack, "/rerank", query=LONG, documents=[LONG, "short"], truncate_prompt_tokens=20, max_tokens_per_doc=7)
    submitted = {tuple(submit.prompt_ids) for submit in worker.submits}
    assert submitted == {tuple(beginning[:20]), tuple(beginning[:7]), tuple(byte_level().encode("short").ids)}
    whole = await post(stack, "/score", text_1="a", text_2=LONG, truncate_prompt_tokens=-1)
    assert whole["usage"]["prompt_tokens"] == MAX_LEN + count("a")
    for given in ([LONG, "short"], [beginning, byte_level().encode("short").ids]):
        embedded = await post(stack, "/v1/embeddings", input=given, truncate_prompt_tokens=20)
        assert list(worker.submits[-2].prompt_ids) == beginning[:20]
        assert embedded["usage"]["prompt_tokens"] == 20 + count("short")


WRONG: list[tuple[str, dict[str, Any], str, str]] = [
    ("/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1", "as many as `text_2` (3), got 2"),
    ("/score", {"text_1": "a", "text_2": ["b", LONG]}, "text_2[1]", "maximum context length is 256"),
    ("/score", {"text_1": "a", "text_2": []}, "text_2", ">= 1"),
    ("/score", {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "1 to 256"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "1 to 256"),
    ("/rerank", {"query": "", "documents": ["a"]}, "query", "empty"),
    ("/rerank", {"query": "a", "documents": ["a", ""]}, "documents[1]", "empty"),
    ("/rerank", {"query": "a", "documents": ["a"] * 2049}, "documents", "2048"),
    ("/rerank", {"query": "a", "documents": [{"title": "a"}]}, "documents[0].text", "Missing required field"),
    ("/rerank", {"query": "a", "documents": ["a"], "top_n": -1}, "top_n", ">= 0"),
    ("/rerank", {"query": "a", "documents": ["a"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", ">= 1"),
]


async def test_invalid_comparison_is_rejected_by_field(stack: GatewayStack) -> None:
    for path, body, param, says in WRONG:
        answer = await stack.http.post(path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert says in error["message"]
