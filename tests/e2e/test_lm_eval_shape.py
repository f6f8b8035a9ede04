"""The request by which lm-eval asks for likelihoods, answered at every position as `transformers` computes it."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack

TOLERANCE = 1e-3
LENGTHS = (1, 2, 17, 64, 150)  # within a block, across blocks, and more than is scored at one time


@cache
def batch() -> list[list[int]]:
    """Token-id prompts as lm-eval makes them: context and continuation of held-out text, of unequal lengths."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    with (TINY_MODEL / "heldout.jsonl").open() as lines:
        texts = [text for text in (json.loads(line)["text"] for line in lines) if len(text) > 2000]
    encoded = [
        tokenizer(text, add_special_tokens=False).input_ids for text in texts[-len(LENGTHS) :]
    ]  # no other test asks for these
    return [ids[:length] for ids, length in zip(encoded, LENGTHS, strict=True)]


@cache
def reference() -> list[Tensor]:
    """Log-probabilities [n, vocab] of what follows each of the n tokens of each prompt."""
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    with torch.inference_mode():
        return [torch.log_softmax(model(torch.tensor([ids])).logits[0], dim=-1) for ids in batch()]


def ask(stack: RunningStack) -> list[dict[str, Any]]:
    """The choices' logprobs, in the order of the prompts."""
    request = {
        "model": "ryzanstein-tiny",
        "prompt": batch(),
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    answer = httpx.post(f"{stack.url}/v1/completions", json=request, timeout=60)
    assert answer.status_code == httpx.codes.OK, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(len(LENGTHS)))
    return [choice["logprobs"] for choice in choices]


def check(found: dict[str, Any], ids: list[int], expected: Tensor) -> None:
    """Every position of one prompt, and the one generated token behind it."""
    token_logprobs, top_logprobs = found["token_logprobs"], found["top_logprobs"]
    assert len(token_logprobs) == len(top_logprobs) == len(found["tokens"]) == len(ids) + 1
    assert token_logprobs[0] is None
    assert top_logprobs[0] is None
    drawn = int(expected[-1].argmax())
    for position, following in enumerate([*ids[1:], drawn], start=1):
        row = expected[position - 1]
        assert token_logprobs[position] == pytest.approx(float(row[following]), abs=TOLERANCE)
        # lm-eval takes a token for greedy when it is the likeliest of top_logprobs.
        assert max(top_logprobs[position].values()) == pytest.approx(float(row.max()), abs=TOLERANCE)
        assert found["tokens"][position] in top_logprobs[position]
        if following == int(row.argmax()):
            assert token_logprobs[position] == max(top_logprobs[position].values())


@pytest.mark.parametrize("time", ["first", "again, with the prompts in the prefix cache"])
def test_loglikelihoods_equal_transformers(float32_stack: RunningStack, time: str) -> None:
    for found, ids, expected in zip(ask(float32_stack), batch(), reference(), strict=True):
        check(found, ids, expected)


def test_the_text_is_the_prompt_and_the_token(float32_stack: RunningStack) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    for found, ids in zip(ask(float32_stack), batch(), strict=True):
        assert "".join(found["tokens"][:-1]) == tokenizer.decode(ids)
        assert found["text_offset"][0] == 0
