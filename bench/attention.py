"""Measures a decode step in a long context, in each mode of attention.

    python -m bench.make_checkpoint 100m /tmp/llama-100m
    python -m bench.attention /tmp/llama-100m --lengths 32768 --kv-dtype int8

The keys are random. Modes take turns, and a reading is the median of its steps, without the draw of a token.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import torch
import typer

from bench.evaluation.forced import ForcedModel
from bench.reading import lower, write_readings
from bench.stats import median
from services.common.attention import AttentionMode

_MODES = "dense; window(64, 4096); top_k(64); top_k(128); top_k(256)"
_WARM_UP = 2  # steps of each mode


def decode_ms(model: ForcedModel, length: int, modes: list[AttentionMode], steps: int) -> dict[AttentionMode, float]:
    """Return the milliseconds of a decode step with `length` keys in each mode."""
    batches = {mode: model.lay_out([1] * length, length - 1, length - 1, mode) for mode in modes}
    times = defaultdict[AttentionMode, list[float]](list)
    for step in range(_WARM_UP + steps):
        for mode in random.sample(modes, len(modes)):
            began = time.perf_counter()
            model.compute(batches[mode])
            if step >= _WARM_UP:
                times[mode].append((time.perf_counter() - began) * 1e3)
    return {mode: median(times[mode]) for mode in modes}


def fill(model: ForcedModel) -> None:
    """Fill the cache with random keys and values, and their summaries."""
    generator = torch.Generator().manual_seed(0)
    cache, slots = model.cache, torch.arange(16, (model.n_blocks + 1) * 16)
    for layer in range(len(cache.layers)):
        for some in torch.split(slots, 4096):
            cache.store(
                layer, some, torch.randn((len(some), cache.summaries[layer][0].numel()), generator=generator).bfloat16()
            )


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder or a GGUF file.")],
    lengths: Annotated[str, typer.Option(help="Keys; commas between.")] = "32768",
    modes: Annotated[str, typer.Option(help="Semicolons between.")] = _MODES,
    kv_dtype: Annotated[str, typer.Option(help="KV format: int8; empty: the model's dtype.")] = "int8",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each mode.")] = 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write readings.")] = None,
) -> None:
    """Time decode steps."""
    sizes, results = [int(length) for length in lengths.split(",")], []
    chosen = [AttentionMode.parse(mode) for mode in modes.split(";")]
    forced = ForcedModel(model, max(sizes), kv_dtype)
    fill(forced)
    for length in sizes:
        for mode, ms in decode_ms(forced, length, chosen, steps).items():
            print(f"{length:>8,} keys  {mode!s:20} {ms:8.2f} ms")
            results.append(lower(f"attention/{length}/{mode}", ms, "ms"))
    if json_file:
        write_readings(json_file, results)


if __name__ == "__main__":
    typer.run(main)
