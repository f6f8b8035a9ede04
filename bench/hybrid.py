"""Compares hybrid models with llama.cpp on the same GGUF file, and long contexts with short ones.

    python -m bench.hybrid lfm2-350m --format bf16 --format int4 --long 32000

The file has the shape of a published model and random weights, on which speed does not depend. Servers take turns as
in bench.compare; llama.cpp is the package `xllamacpp`. `--long` also measures, of this server alone, the time between
tokens of a request with so many tokens of context over that of one with 1,024, and `--rounds 0` nothing else:

    python -m bench.hybrid lfm2-350m --format int4 --rounds 0 --long 32000 --kv-dtype int8 --attention top_k
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import gguf
import torch
import transformers
import typer
from rich.console import Console

from bench.compare import SETTLE_S, Entry, compare, scenarios, show
from bench.compare_formats import FORMATS
from bench.make_checkpoint import byte_level_tokenizer
from bench.serve import Load, drive, first_model
from bench.servers import ModelTarget, read_peers, started
from bench.standstill import watch
from services.tools.converter.vocabulary_keys import FolderTokenizer, vocabulary_keys
from tests.unit.compute.model.formats.gguf.models import uniform, write_model

_SHORT = 1_024  # tokens of the context that a long one is compared with
_OUTPUTS = 128
_ATTENTION, _STATE = "full_attention", "linear_attention"


def _lfm2() -> transformers.PretrainedConfig:
    """LFM2-350M."""
    attending = {2, 5, 8, 10, 12, 14}
    return transformers.Lfm2Config(
        vocab_size=65_536,
        hidden_size=1_024,
        intermediate_size=4_608,
        block_auto_adjust_ff_dim=False,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=128_000,
        layer_types=[_ATTENTION if index in attending else "conv" for index in range(16)],
        tie_word_embeddings=True,
    )


def _granite() -> transformers.PretrainedConfig:
    """Granite 4.0 H 350M."""
    attending = {10, 13, 17, 27}
    return transformers.GraniteMoeHybridConfig(
        vocab_size=100_352,
        hidden_size=768,
        intermediate_size=2_048,
        shared_intermediate_size=2_048,
        num_hidden_layers=32,
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        max_position_embeddings=32_768,
        layer_types=[_ATTENTION if index in attending else _STATE for index in range(32)],
        position_embedding_type="nope",
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        mamba_n_groups=1,
        attention_multiplier=0.015625,
        embedding_multiplier=12.0,
        residual_multiplier=0.246,
        logits_scaling=3.0,
        tie_word_embeddings=True,
    )


MODELS: dict[str, tuple[str, Callable[[], transformers.PretrainedConfig]]] = {
    "lfm2-350m": ("lfm2", _lfm2),
    "granite-4-h-350m": ("granitehybrid", _granite),
}


def write_file(name: str, weights: str, folder: Path) -> Path:
    """Write a model with random weights in a format of bench.compare."""
    arch, make = MODELS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(make())
    n_tokens = model.config.vocab_size
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    keys = vocabulary_keys(FolderTokenizer(folder, byte_level_tokenizer(n_tokens), special, "", (1,), n_tokens))

    def describe(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            _add(writer, key, value)

    kind = gguf.GGMLQuantizationType[FORMATS[weights].gguf]
    with torch.inference_mode():
        return write_model(model, arch, folder / f"{name}-{weights}.gguf", uniform(kind), describe=describe)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


async def long_over_short(entry: Entry, vocab: int, long: int, log: Path) -> tuple[float, float]:
    """Return the milliseconds between tokens with `_SHORT` tokens of context, and with `long`."""
    async with started(entry.peer, entry.home, entry.target, log) as server:
        model = await first_model(server.url)
        loads = [Load(1, 1, n, _OUTPUTS, vocab=vocab, seed=seed) for seed, n in enumerate((_SHORT, _SHORT, long))]
        paces = [(await drive(server.url, model, load)).tpot_ms_p50 for load in loads]  # the first one warms up
    return paces[1], paces[2]


def main(
    model: Annotated[str, typer.Argument(help=f"One of {', '.join(MODELS)}.")],
    formats: Annotated[list[str] | None, typer.Option("--format", help="bf16, int8 or int4, again for each.")] = None,
    home: Annotated[str, typer.Option(help="Where both servers are installed.")] = ".venv",
    rounds: Annotated[int, typer.Option(min=0, help="Those of the comparison; 0: none.")] = 2,
    long: Annotated[int, typer.Option(help="Tokens of a long context; 0: not measured.")] = 0,
    kv_dtype: Annotated[str, typer.Option(help="Numbers of this server's KV cache.")] = "auto",
    attention: Annotated[str, typer.Option(help="How its generated tokens attend: dense, window or top_k.")] = "dense",
    settle: Annotated[float, typer.Option(help="Seconds that the machine has to itself after each server.")] = SETTLE_S,
) -> None:
    """Measure MODEL."""
    wanted = formats or ["bf16"]
    if model not in MODELS:
        raise typer.BadParameter(f"MODEL {model}: allowed: {', '.join(MODELS)}")
    if unknown := set(wanted) - set(FORMATS):
        raise typer.BadParameter(f"--format {', '.join(sorted(unknown))}: allowed: {', '.join(FORMATS)}")
    vocab = MODELS[model][1]().vocab_size
    with tempfile.TemporaryDirectory() as folder:
        peers, logs = read_peers(), Path(tempfile.mkdtemp(prefix="hybrid-logs-"))
        for weights in wanted:
            file = write_file(model, weights, Path(folder))
            target = ModelTarget(str(file), kv_dtype=kv_dtype, attention=attention)
            entries = [Entry(peers[name], home, target, weights) for name in ("ryzanstein", "xllamacpp")]
            if rounds:
                with watch(os.sched_getaffinity(0)) as machine:
                    results = asyncio.run(compare(entries, scenarios(vocab)[:2], rounds, logs, machine, settle))
                show(results[weights] | {"format": f"{model}, {weights}"}, Console(width=160))
            if long:
                near, far = asyncio.run(long_over_short(entries[0], vocab, long, logs / "long.log"))
                times = f"{near:.1f} ms a token with {_SHORT:,} of context, {far:.1f} with {long:,}"
                print(f"{weights}: {times}, {far / near:.2f} times as long")


if __name__ == "__main__":
    typer.run(main)
