"""Measures generation with `transformers`, for comparison with `bench.engine` on the same model, batch and lengths.

    python -m bench.generate /tmp/llama-1b --device cuda --batches 1,16,64 --static

`--static` gives the cache a fixed shape, so that `generate` compiles the decode step (CUDA graphs on a GPU).
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from transformers import AutoModelForCausalLM, PreTrainedModel


def seconds(model: PreTrainedModel, ids: torch.Tensor, tokens: int, static: bool) -> float:
    """Time to generate `tokens` more tokens for each row of `ids`, greedily."""
    options = {"cache_implementation": "static"} if static else {}
    began = time.perf_counter()
    outputs = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    assert outputs[:, -1].tolist()  # waits for the device
    return time.perf_counter() - began


def main(
    model: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    device: str = "cpu",
    dtype: str = "bfloat16",
    batches: str = "1,16,64",
    prompt_tokens: int = 128,
    output_tokens: int = 64,
    rounds: int = 3,
    static: bool = False,
) -> None:
    """Measure a decode step of MODEL: what tokens after the first eighth take, the best of the rounds."""
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).to(device).eval()
    few = output_tokens // 8
    for batch in (int(size) for size in batches.split(",")):
        ids = torch.randint(2, loaded.config.vocab_size, (batch, prompt_tokens), device=device)
        for tokens in (output_tokens, few):  # warm-up: compiles
            seconds(loaded, ids, tokens, static)
        whole = min(seconds(loaded, ids, output_tokens, static) for _ in range(rounds))
        start = min(seconds(loaded, ids, few, static) for _ in range(rounds))
        step = (whole - start) / (output_tokens - few)
        speed = f"{step * 1e6:,.0f} us a step, {batch / step:,.0f} tokens/s"
        print(f"{model.name}, {dtype}, {device}, {batch} at once: {speed}")


if __name__ == "__main__":
    typer.run(main)
