"""Greedy texts of a GGUF file, by this worker and by llama.cpp; prints the margin where two texts part.

    python -m bench.gguf_parity FILE.gguf --prompts 20 --tokens 200
    python -m bench.gguf_parity FILE.gguf --exact

llama.cpp rounds activations to 8 bits before it multiplies with quantized weights, so texts part where two tokens are
nearly equally likely. With `--exact` nothing is rounded: this worker computes the file in float32, and llama.cpp, with
keys and values in float32, a copy of it whose numbers the package `gguf` has dequantized. A margin is the difference of
the log probabilities that llama.cpp gives both tokens where two texts part. Needs the package `xllamacpp`.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import xllamacpp
from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from services.worker.native.offline import open_offline
from services.worker.native.startup import read_model
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
    """llama.cpp over one file, in this process. `exact`: keys, values and products of attention in float32."""

    def __init__(self, file: Path, n_threads: int, *, exact: bool = False) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(file)
        params.n_ctx, params.n_parallel, params.cpuparams.n_threads = _CONTEXT, 1, n_threads
        params.warmup, params.fit_params, params.verbosity = False, False, -1
        if exact:
            params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
            params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = xllamacpp.Server(params)

    def greedy(self, ids: Sequence[int], n_tokens: int) -> list[dict[str, Any]]:
        """Return the tokens with their probabilities, most likely first."""
        body = {"prompt": list(ids), "max_tokens": n_tokens, "temperature": 0, "logprobs": _TOP, "ignore_eos": False}
        answer = self._server.handle_completions(body)
        content: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        return content


def write_dequantized(file: Path, out: Path) -> Path:
    """Write a copy of `file` whose numbers are float32, by the package `gguf` alone; returns `out`."""
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":  # the writer adds these
            kind = field.types[0]
            writer.add_key_value(name, field.contents(), kind, field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        shape = tensor.shape[::-1].tolist()
        writer.add_tensor_info(tensor.name, shape, np.dtype(np.float32), int(tensor.n_elements) * 4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in reader.tensors:
        writer.write_tensor_data(gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.close()
    return out


async def ours(file: Path, prompts: Sequence[Sequence[int]], n_tokens: int, dtype: str) -> list[list[int]]:
    """Return this worker's greedy tokens."""
    settings = WorkerSettings(model=str(file), max_model_len=_CONTEXT, kv_tokens=16_384, dtype=dtype)
    async with open_offline(settings) as engine:
        sampling = Sampling(max_tokens=n_tokens, stop_token_ids=engine.config.eos_token_ids)
        return await engine.generate(prompts, sampling)


def partings(
    file: Path, prompts: Sequence[str], n_tokens: int, *, exact: bool = False, n_threads: int = 1
) -> Iterator[Parting]:
    """Compare the texts of each prompt."""
    tokenizer = Tokenizer.from_buffer(read_model(file).tokenizer.json)
    ids = [tokenizer.encode(prompt).ids for prompt in prompts]
    answers = asyncio.run(ours(file, ids, n_tokens, "float32" if exact else "auto"))
    with tempfile.TemporaryDirectory() as folder:
        theirs = write_dequantized(file, Path(folder) / file.name) if exact else file
        peer = LlamaCpp(theirs, n_threads, exact=exact)
        for prompt, token_ids, mine in zip(prompts, ids, answers, strict=True):
            yield _parting(prompt, mine, peer.greedy(token_ids, n_tokens))


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
    parser.add_argument("--exact", action="store_true", help="compare numbers in float32")
    parser.add_argument("--threads", type=int, default=1, help="llama.cpp's; several wait for each other on busy cores")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_buffer(read_model(options.file).tokenizer.json)
    compared = []
    for one in partings(
        options.file, PROMPTS[: options.prompts], options.tokens, exact=options.exact, n_threads=options.threads
    ):
        compared.append(one)
        verdict = f"equal for {one.n_equal} of {one.n_tokens} tokens"
        if one.ours is not None:
            pair = " and ".join(repr(tokenizer.decode([token])) for token in (one.ours, one.theirs))
            verdict += f", then {pair}, margin {one.margin:.3f}"
        print(f"{one.prompt[:30]!r:34} {verdict}", flush=True)
    equal = sum(one.ours is None for one in compared)
    print(f"{equal} of {len(compared)} texts equal; largest margin {max(one.margin for one in compared):.3f}")


if __name__ == "__main__":
    main()
