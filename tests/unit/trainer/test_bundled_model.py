from __future__ import annotations

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from trainer.config import Recipe
from trainer.corpus import is_held_out
from trainer.evaluate import ask, complete, read_held_out, score_documents
from trainer.export import load_exported
from trainer.model import Llama, initialise


def test_weights_fit_in_16_megabytes(bundled_folder: Path) -> None:
    assert (bundled_folder / "model.safetensors").stat().st_size <= 16_000_000
    assert (bundled_folder / "heldout.jsonl").stat().st_size <= 300_000


def test_divides_over_one_two_and_four_ranks(bundled_folder: Path) -> None:
    shape, weights = load_exported(bundled_folder)
    for size in (shape.n_heads, shape.n_kv_heads, shape.ffn_size, shape.hidden_size, shape.vocab_size):
        assert size % 4 == 0
    assert "lm_head.weight" not in weights
    assert 5e6 <= sum(weight.numel() for weight in weights.values()) <= 8e6


def test_held_out_text_was_held_out(bundled_folder: Path) -> None:
    documents = read_held_out(bundled_folder / "heldout.jsonl")
    assert {document.group for document in documents} == {"library", "tests", "documentation"}
    for document in documents:
        unit = document.path.removesuffix("#docstrings")
        assert is_held_out(unit, Recipe().seed, 4.0), document.path


def test_stored_metrics_reproduce(bundled: tuple[Llama, Tokenizer], bundled_folder: Path) -> None:
    metrics = json.loads((bundled_folder / "metrics.json").read_text(encoding="utf-8"))
    documents = read_held_out(bundled_folder / "heldout.jsonl")
    documentation = [document for document in documents if document.group == "documentation"]
    score = score_documents(*bundled, documentation)["documentation"]
    stored = metrics["held_out"]["documentation"]
    assert score.n_tokens == stored["tokens"]
    assert score.n_bytes == stored["bytes"]
    assert score.bits_per_byte == pytest.approx(stored["bits_per_byte"], rel=2e-3)
    assert score.perplexity == pytest.approx(stored["perplexity"], rel=5e-3)


def test_knows_held_out_text_far_better_than_untrained_weights(
    bundled: tuple[Llama, Tokenizer], bundled_folder: Path
) -> None:
    model, tokenizer = bundled
    untrained = Llama(model.shape)
    initialise(untrained, seed=0)
    documents = read_held_out(bundled_folder / "heldout.jsonl")[:4]
    openings = [replace(document, text=document.text[:1_500]) for document in documents]
    before = score_documents(untrained, tokenizer, openings)["all"].bits_per_byte
    after = score_documents(model, tokenizer, openings)["all"].bits_per_byte
    assert after < 1.5
    assert after < before / 2


@pytest.mark.parametrize(
    "prompt",
    [
        "def total(items):\n    result = 0\n    for i in range(",
        "class Queue:\n    def __init__(self",
        "def read(path):\n    try:\n        return int(",
    ],
)
def test_python_prompts_continue_as_python(bundled: tuple[Llama, Tokenizer], prompt: str) -> None:
    text = prompt + complete(*bundled, prompt, max_tokens=24).completion
    line = len(prompt.splitlines())
    completed = "\n".join(text.splitlines()[:line])
    assert len(completed) > len(prompt)
    # The line the prompt broke off in is now whole: with a body where it opens a block, the whole text parses.
    indent = len(completed.splitlines()[-1]) - len(completed.splitlines()[-1].lstrip())
    body = "\n" + " " * (indent + 4) + "pass" if completed.endswith(":") else ""
    handler = "\n    finally:\n        pass" if "try:" in prompt else ""
    ast.parse(completed + body + handler + "\n")


def test_an_answer_ends(bundled: tuple[Llama, Tokenizer]) -> None:
    answer = ask(*bundled, "Write a function that reverses a string.", max_tokens=80)
    assert "def reverse" in answer.completion
    assert answer.completion.rstrip().endswith("```")
    assert len(bundled[1].encode(answer.completion).ids) < 80


def test_metrics_name_the_model_card_numbers(bundled_folder: Path) -> None:
    metrics = json.loads((bundled_folder / "metrics.json").read_text(encoding="utf-8"))
    card = (bundled_folder / "README.md").read_text(encoding="utf-8")
    for score in metrics["held_out"].values():
        assert f"{score['bits_per_byte']:.3f}" in card
    assert (bundled_folder / "loss.png").stat().st_size > 5_000
