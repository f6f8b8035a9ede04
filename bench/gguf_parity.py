"""Greedy texts of a GGUF file, by this worker and by llama.cpp; prints the margin where two texts part.

    python -m bench.gguf_parity FILE.gguf --prompts 20 --tokens 200

llama.cpp rounds activations to 8 bits before it multiplies with quantized weights, so texts part where two tokens are
nearly equally likely. A margin is the difference of the log probabilities that llama.cpp gives both tokens there.
Needs the package `xllamacpp`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xllamacpp
from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from services.worker.native.model_files import read_model_files
from services.worker.native.offline import open_offline
from services.worker.settings import WorkerSettings

PROMPTS = (
    "The three primary colors are",
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):",
    "Water boils at a temperature of",
    "The quick brown fox",
    "In 1969, the first people on the Moon",
    "A list of five fruits:\n1.",
    "To make bread, you need",
    "The theory of evolution says that",
    "import numpy as np\n\ndef mean(values):",
    "Dear Sir or Madam,",
    "The largest planet of the solar system is",
    "Question: What is the square root of 144?\nAnswer:",
    "Les trois couleurs du drapeau français sont",
    "Shakespeare wrote",
    "SELECT name, age FROM people WHERE",
    "The heart pumps blood through",
    "It was a dark and stormy night;",
    "Photosynthesis is the process by which",
)
_TOP = 10  # tokens whose probabilities llama.cpp reports
_CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Parting:
    """Where two texts part; `margin` is infinite if llama.cpp's most likely tokens do not include ours."""

    prompt: str
    n_equal: int
    n_tokens: int
    ours: int | None  # None: the texts are equal
    theirs: int | None
    margin: float


class LlamaCpp:
    """llama.cpp over one file, in this process."""

    def __init__(self, file: Path, n_threads: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.cpuparams.n_threads = _CONTEXT, 1, n_threads
        params.warmup, params.fit_params, params.verbosity = False, False, -1
        self._server = xllamacpp.Server(params)

    def greedy(self, ids: Sequence[int], n_tokens: int) -> list[dict[str, Any]]:
        """Return the tokens with their probabilities, most likely first."""
        asked = {"prompt": list(ids), "max_tokens": n_tokens, "temperature": 0, "logprobs": _TOP, "ignore_eos": False}
        answer = self._server.handle_completions(asked)
        found: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        return found


async def ours(file: Path, prompts: Sequence[Sequence[int]], n_tokens: int, dtype: str) -> list[list[int]]:
    """Return this worker's greedy tokens."""
    settings = WorkerSettings(model=str(file), max_model_len=_CONTEXT, kv_tokens=16_384, dtype=dtype)
    async with open_offline(settings) as engine:
        sampling = Sampling(max_tokens=n_tokens, stop_token_ids=engine.config.eos_token_ids)
        return await engine.generate(prompts, sampling)


def partings(
    file: Path, prompts: Sequence[str], n_tokens: int, dtype: str = "auto", n_threads: int = 1
) -> Iterator[Parting]:
    """Compare the texts of each prompt."""
    tokenizer = Tokenizer.from_buffer(read_model_files(file).tokenizer_json)
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    answers = asyncio.run(ours(file, ids, n_tokens, dtype))
    peer = LlamaCpp(file, n_threads)
    for prompt, asked, mine in zip(prompts, ids, answers, strict=True):
        yield _parting(prompt, mine, peer.greedy(asked, n_tokens))


def _parting(prompt: str, mine: Sequence[int], theirs: Sequence[dict[str, Any]]) -> Parting:
    n_tokens = min(len(mine), len(theirs))
    for place, (own, other) in enumerate(zip(mine, theirs, strict=False)):
        if own != other["id"]:
            likely = {top["id"]: top["logprob"] for top in other["top_logprobs"]}
            margin = likely[other["id"]] - likely.get(own, float("-inf"))
            return Parting(prompt, place, n_tokens, own, other["id"], margin)
    return Parting(prompt, n_tokens, n_tokens, None, None, 0.0)


def main() -> None:
    """Print each comparison and the largest margin."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1, help="llama.cpp's; several wait for each other on busy cores")
    asked = parser.parse_args()
    tokenizer = Tokenizer.from_buffer(read_model_files(asked.file).tokenizer_json)
    found = []
    for one in partings(asked.file, PROMPTS[: asked.prompts], asked.tokens, asked.dtype, asked.threads):
        found.append(one)
        said = f"equal for {one.n_equal} of {one.n_tokens} tokens"
        if one.ours is not None:
            pair = " and ".join(repr(tokenizer.decode([token])) for token in (one.ours, one.theirs))
            said += f", then {pair}, margin {one.margin:.3f}"
        print(f"{one.prompt[:30]!r:34} {said}", flush=True)
    equal = sum(one.ours is None for one in found)
    print(f"{equal} of {len(found)} texts equal; largest margin {max(one.margin for one in found):.3f}")


if __name__ == "__main__":
    main()
