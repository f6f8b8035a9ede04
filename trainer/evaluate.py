"""How good the exported model is: bits per byte and perplexity on held-out text, and sample completions."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from trainer.export import load_exported, stop_tokens
from trainer.model import Llama
from trainer.tokenizer import END_OF_TEXT, render_turn, token_id

CONTEXT = 1_024
STRIDE = 512

PROMPTS = (
    "def add(a, b):\n",
    "for i in range(",
    "import os\nimport sys\n",
    "class Queue:\n    def __init__(self",
    "The 'with' statement",
)
QUESTIONS = (
    "Hello",
    "What does `os.path.join` do?",
    "Write a function that reverses a string.",
    "What is the module `json` for?",
)


@dataclass(frozen=True)
class HeldOut:
    """One held-out document."""

    path: str
    group: str
    text: str


@dataclass(frozen=True)
class Score:
    """Cross-entropy summed over a text."""

    nats: float
    n_tokens: int
    n_bytes: int

    def __add__(self, other: Score) -> Score:
        return Score(self.nats + other.nats, self.n_tokens + other.n_tokens, self.n_bytes + other.n_bytes)

    @property
    def bits_per_byte(self) -> float:
        """Bits the model needs for a byte of UTF-8."""
        return self.nats / math.log(2) / self.n_bytes

    @property
    def perplexity(self) -> float:
        """Perplexity per token of this tokenizer."""
        return math.exp(self.nats / self.n_tokens)

    def to_json(self) -> dict[str, float]:
        """Rounded values for `metrics.json`."""
        return {
            "bits_per_byte": round(self.bits_per_byte, 4),
            "perplexity": round(self.perplexity, 3),
            "tokens": self.n_tokens,
            "bytes": self.n_bytes,
        }


@dataclass(frozen=True)
class Sample:
    """A prompt and its greedy continuation."""

    prompt: str
    completion: str


def load_model(folder: Path) -> tuple[Llama, Tokenizer]:
    """An exported model in fp32, and its tokenizer."""
    shape, weights = load_exported(folder)
    model = Llama(shape)
    model.load_state_dict(weights)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def read_held_out(path: Path) -> list[HeldOut]:
    """Documents of a `heldout.jsonl`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [HeldOut(**json.loads(line)) for line in lines]


@torch.inference_mode()
def score_text(model: Llama, tokenizer: Tokenizer, text: str) -> Score:
    """Scores every token of `text`, each seeing at least 512 tokens before it once there are as many."""
    start = token_id(tokenizer, END_OF_TEXT)
    tokens = torch.tensor([start, *tokenizer.encode(text, add_special_tokens=False).ids])
    nats = sum(_window_nats(model, tokens, first, last) for first, last in _windows(len(tokens) - 1))
    return Score(nats, len(tokens) - 1, len(text.encode()))


def _windows(n_targets: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of targets that tile 0..n_targets; the first is a whole context, the rest a stride."""
    first = 0
    while first < n_targets:
        last = min(n_targets, first + (CONTEXT if first == 0 else STRIDE))
        yield first, last
        first = last


def _window_nats(model: Llama, tokens: Tensor, first: int, last: int) -> float:
    begin = max(0, last - CONTEXT)
    logits = model(tokens[None, begin:last])[0, first - begin :]  # [last - first, vocab]
    return float(F.cross_entropy(logits.float(), tokens[first + 1 : last + 1], reduction="sum"))


def score_documents(model: Llama, tokenizer: Tokenizer, documents: Iterable[HeldOut]) -> dict[str, Score]:
    """Scores by group, and over everything under `all`."""
    totals: dict[str, Score] = {}
    for document in documents:
        score = score_text(model, tokenizer, document.text)
        for name in ("all", document.group):
            totals[name] = totals[name] + score if name in totals else score
    return totals


@torch.inference_mode()
def complete(model: Llama, tokenizer: Tokenizer, prompt: str, max_tokens: int = 64) -> Sample:
    """Greedy continuation after the end-of-text token and `prompt`, up to an end token or `max_tokens`."""
    ends = set(stop_tokens(tokenizer))
    start = token_id(tokenizer, END_OF_TEXT)
    tokens = [start, *tokenizer.encode(prompt, add_special_tokens=False).ids]
    n_prompt = len(tokens)
    while len(tokens) - n_prompt < max_tokens:
        following = int(model(torch.tensor([tokens]))[0, -1].argmax())
        if following in ends:
            break
        tokens.append(following)
    return Sample(prompt, tokenizer.decode(tokens[n_prompt:]))


def ask(model: Llama, tokenizer: Tokenizer, question: str, max_tokens: int = 96) -> Sample:
    """Greedy answer to one question in the chat template's form."""
    sample = complete(model, tokenizer, render_turn("user", question) + "<|assistant|>\n", max_tokens)
    return Sample(question, sample.completion)


def summarise_log(path: Path) -> dict[str, float]:
    """Totals of a training log: steps, tokens, minutes, mean rate and final loss (mean of the last 50 steps)."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    last, tail = records[-1], records[-50:]
    return {
        "steps": last["step"],
        "tokens": last["tokens"],
        "minutes": round(last["seconds"] / 60, 1),
        "tokens_per_second": round(last["tokens"] / last["seconds"]),
        "final_loss": round(sum(record["loss"] for record in tail) / len(tail), 4),
    }
