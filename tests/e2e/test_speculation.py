"""Over HTTP an answer is the same with drafts and without: texts, scores, calls, ends and counts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.stack import RunningStack, running_stack

NAMES: Any = {"type": "array", "items": {"type": "string", "maxLength": 12}, "minItems": 9, "maxItems": 9}
NOTES: Any = {
    "type": "object",
    "properties": {"first_name": {"type": "string", "maxLength": 12}, "further_names": NAMES},
    "required": ["first_name", "further_names"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "take_notes", "parameters": NOTES}}
CODE = {"prompt": "class Stack:\n", "seed": 3}
CHAT = {"messages": [{"role": "user", "content": "Take notes of nine names."}], "max_tokens": 500, "seed": 4}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("completions", CODE | {"temperature": 0.9, "ignore_eos": True, "max_tokens": 900}),
    ("completions", CODE | {"temperature": 0.0, "max_tokens": 200, "stop": ["return", "self"]}),
    ("completions", CODE | {"temperature": 0.9, "n": 3, "max_tokens": 150}),
    (
        "completions",
        CODE
        | {"temperature": 0.8, "frequency_penalty": 0.6, "presence_penalty": 0.3, "repetition_penalty": 1.1}
        | {"logit_bias": {"300": 3, "301": -3}, "min_tokens": 60, "logprobs": 2, "max_tokens": 200},
    ),
    ("chat/completions", CHAT | {"temperature": 0.9, "guided_json": NOTES}),
    (
        "chat/completions",
        CHAT | {"temperature": 0.9, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    ),
]


@pytest.fixture(scope="module")
def undrafted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("run"), "--speculation", "off") as running:
        yield running


def ask(stack: RunningStack, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs from one to the next: ids of calls."""
    got = httpx.post(f"{stack.url}/v1/{path}", json={"model": stack.model(), **body}, timeout=120)
    assert got.status_code == httpx.codes.OK, got.text
    answer: dict[str, Any] = got.json()
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls") or []:
            del call["id"]
    return answer


def test_answers_are_the_same_with_drafts_and_without(stack: RunningStack, undrafted: RunningStack) -> None:
    """The prediction is the answer, or a part of it."""
    n_accepted = 0
    for path, body in BODIES:
        expected = ask(undrafted, path, body)
        first = expected["choices"][0]
        text = first["text"] if path == "completions" else first["message"]["content"] or '{"first_name": "'
        content = {"type": "content", "content": text}
        drafted = ask(stack, path, body | {"prediction": content})
        n_accepted += accepted(drafted)
        assert drafted["choices"] == expected["choices"]
        assert drafted["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]
    path, body = BODIES[0]
    text = ask(undrafted, path, body)["choices"][0]["text"]
    while not n_accepted:  # there are no drafts while those of earlier requests have used up what they may cost
        n_accepted = accepted(ask(stack, path, body | {"prediction": text}))


def accepted(answer: dict[str, Any]) -> int:
    """The tokens of the prediction that were drafted and accepted."""
    return int(answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"])
