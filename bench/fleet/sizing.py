"""Sizes of a fleet by the options: numbers of workers, their speed, and a model that holds the longest request."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import typer

from services.worker.settings import DEFAULT_KV_TOKENS
from services.worker.simulated.curve import StepCurve

_KV_REQUESTS = 2  # longest requests that a worker's KV cache holds, at least


def sizes_of(sweep: str) -> list[int]:
    """The numbers of workers; raises typer.BadParameter."""
    sizes = [part.strip() for part in sweep.split(",")]
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise typer.BadParameter(f"--sweep: expected numbers of workers such as 10,100,300, not {sweep!r}")
    return [int(size) for size in dict.fromkeys(sizes)]


def settings_of(given: Sequence[str]) -> dict[str, str]:
    """Settings by their names; raises typer.BadParameter."""
    settings = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"--set: expected NAME=VALUE such as STEP_MERGE_MS=50, not {each!r}")
        settings[name] = value
    return settings


def speed_for(streams: int, curve: StepCurve, workers: int, rate: float, answer_tokens: int) -> float:
    """The speed of workers at which `rate` answers a second keep `streams` of them open, spread evenly."""
    step_s = curve.seconds(math.ceil(streams / workers), 0.0, 0, 0.0)
    return answer_tokens * step_s * rate / streams


@contextmanager
def sized_model(model: Path, longest: int) -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder of the model whose positions hold `longest` tokens, and settings of workers whose KV cache does.

    Simulated workers read no weights, so a copy of the other files with more positions is a longer model to them.
    """
    config = json.loads((model / "config.json").read_text())
    kv_tokens = _KV_REQUESTS * longest
    settings = {"KV_TOKENS": str(kv_tokens)} if kv_tokens > DEFAULT_KV_TOKENS else {}
    if config["max_position_embeddings"] >= longest:
        yield model, settings
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / model.name
        shutil.copytree(model, copy, ignore=shutil.ignore_patterns("*.safetensors"))
        (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
        yield copy, settings
