"""Greedy output through the whole stack equals `transformers` on the same checkpoint, token for token."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack, running_stack

# The reference is computed inside the first test, on one thread: slow where the machine is busy.
N_TOKENS = 24
PROMPTS = [
    "def fibonacci(n):",
    "import os\nimport sys\n",
    "class Stack:\n    def __init__(self):\n        ",
    "for i in range(10):\n    ",
    "try:\n    import json\nexcept ",
    "with open(path) as f:\n    ",
    "    return ",
    "if __name__ == '__main__':\n    ",
    "The quick brown fox",
    "x",
    "# This module provides",
    '"""Return the number of',
    "def test_",
    "lambda x: ",
    "raise ValueError(",
    "    self.assertEqual(",
    "async def main():\n    await ",
    "from collections import ",
    "Überraschung: ",
    "while True:\n    line = input()\n    if not line:\n        break\n",
]


@cache
def reference() -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32)
    continuations = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.inference_mode():
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=N_TOKENS,
                min_new_tokens=N_TOKENS,
                do_sample=False,
            )
        continuations.append(whole[0, ids.shape[1] :].tolist())
    return continuations


@pytest.mark.parametrize("ranks", [1, 4])  # two ranks: tests/integration/worker_server/test_real_ranks.py
def test_greedy_tokens_equal_transformers(tmp_path: Path, float32_stack: RunningStack, ranks: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    options = ("--tensor-parallel", str(ranks), "--dtype", "float32")
    with nullcontext(float32_stack) if ranks == 1 else running_stack(tmp_path, *options) as stack:
        ask = partial(stack.complete, max_tokens=N_TOKENS, min_tokens=N_TOKENS, temperature=0, return_token_ids=True)
        with ThreadPoolExecutor(len(PROMPTS)) as clients:
            answers = list(clients.map(lambda prompt: ask(prompt=prompt), PROMPTS))
        for answer, expected in zip(answers, reference(), strict=True):
            assert answer.status_code == httpx.codes.OK, answer.text
            assert answer.json()["choices"][0]["token_ids"] == expected, tokenizer.decode(expected)
