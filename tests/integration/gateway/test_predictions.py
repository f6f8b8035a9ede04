"""An expected answer reaches workers as tokens, and usage counts what they drafted from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from ryzanstein.v1 import worker_pb2

from tests.integration.gateway.fleet import Fault, Worker
from tests.integration.gateway.gateways import running_stack
from tests.unit.gateway.made_tokenizers import byte_level

TEXT = "A list is <|im_end|> a sequence."
PARTS = [{"type": "text", "text": TEXT[:7]}, {"type": "text", "text": TEXT[7:]}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", {"prediction": {"type": "content", "content": TEXT}}),
    ("chat/completions", {"prediction": {"type": "content", "content": PARTS}, "n": 3}),
    ("completions", {"prediction": TEXT, "n": 2}),
    ("completions", {"prediction": {"type": "content", "content": PARTS}, "prompt": ["a", "b"]}),
]
INPUTS = {"chat/completions": {"messages": [{"role": "user", "content": "hi"}]}, "completions": {"prompt": "a"}}


def usage_of(streamed: str) -> list[dict[str, Any]]:
    events = [json.loads(line[6:]) for line in streamed.split("\n") if line.startswith("data: {")]
    return [event["usage"] for event in events if event.get("usage")]


@pytest.mark.parametrize(("path", "fields"), BODIES)
async def test_prediction_is_tokenized_and_its_counts_are_summed(path: str, fields: dict[str, Any]) -> None:
    async with running_stack([Worker("w0", sizes=(1, 4, 2))]) as stack:
        body = INPUTS[path] | {"max_tokens": 10, "seed": 1} | fields
        answer = (await stack.http.post(f"/v1/{path}", json=body)).json()
        sequences = len(answer["choices"])
        for submit in stack.workers[0].submits:
            ids = list(submit.prediction_ids)
            assert byte_level().decode(ids, skip_special_tokens=False) == TEXT
            assert min(ids) > 3, "no control token, even where the text spells one"
        # Steps of 1, 4, 2, 1 and 2 tokens.
        counts = {"accepted_prediction_tokens": 5 * sequences, "rejected_prediction_tokens": 15 * sequences}
        assert answer["usage"]["completion_tokens"] == 10 * sequences
        assert answer["usage"]["completion_tokens_details"] == counts
        options = {"include_usage": True, "continuous_usage_stats": True}
        streamed = (await stack.http.post(f"/v1/{path}", json=body | {"stream": True, "stream_options": options})).text
        *running, last = usage_of(streamed)
        assert last == answer["usage"]
        assert all("completion_tokens_details" in usage for usage in running)
        assert len(stack.workers[0].submits) == 2 * sequences


async def test_prediction_goes_along_when_another_worker_resumes() -> None:
    async with running_stack([Worker("w0", sizes=(3,)), Worker("w1", sizes=(3,))]) as stack:
        stack.workers[0].faults = [Fault("break", 6)]
        body = {"prompt": "a", "max_tokens": 12, "prediction": TEXT, "seed": 3}
        while stack.workers[0].faults:
            answer = (await stack.complete(**body)).json()
        first, second = stack.workers[0].submits[-1], stack.workers[1].submits[-1]
        assert second.attempt == 2
        assert first.prediction_ids == second.prediction_ids
        assert first.prediction_ids
        details = answer["usage"]["completion_tokens_details"]
        assert details == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 12}, "of both attempts"


async def test_drafted_tokens_behind_a_stop_string_are_rejected() -> None:
    ids = byte_level().encode("abcdefgh").ids
    worker = Worker("w0", token=lambda prompt, seed, index: ids[index], sizes=(len(ids),))
    async with running_stack([worker]) as stack:
        body = {"prompt": "a", "max_tokens": len(ids), "prediction": "abcdefgh", "stop": ["c"]}
        answer = (await stack.complete(**body)).json()
        assert answer["choices"][0]["text"] == "ab"
        used = answer["usage"]["completion_tokens"]
        details = answer["usage"]["completion_tokens_details"]
        assert used < len(ids) - 1
        assert details == {"accepted_prediction_tokens": used, "rejected_prediction_tokens": 3 + len(ids) - 1 - used}


@pytest.mark.parametrize("prediction", [None, "", TEXT])
async def test_counts_are_present_when_a_prediction_was_sent(prediction: str | None) -> None:
    """An engine that does not draft, as vLLM, reports none."""
    async with running_stack([Worker("w0", abilities=worker_pb2.ModelCard(engine="vllm"))]) as stack:
        usage = (await stack.complete(prompt="a", max_tokens=2, prediction=prediction)).json()["usage"]
    none = {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0 if not prediction else 6}
    assert usage.get("completion_tokens_details") == (None if prediction is None else none)
