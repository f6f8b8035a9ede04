"""An installation whose pool runs on vLLM, and its processes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.stack import RunningStack, running_stack

PYTHON = os.environ.get("RYZANSTEIN_TEST_VLLM", "")
START_S = 900  # of vLLM on a busy machine


@contextmanager
def vllm_installation(folder: Path) -> Iterator[RunningStack]:
    """Two workers on vLLM, which serve the tiny model as `tiny`."""
    engine = (
        "--engine=vllm",
        f"--engine-python={PYTHON}",
        "--engine-arg=enforce_eager=true",
        "--engine-arg=block_size=32",
    )
    sizes = ("--workers=2", "--dtype=float32", "--max-model-len=512", "--kv-tokens=16384", f"--start-timeout={START_S}")
    with running_stack(folder, *engine, *sizes, "--served-model-name=tiny", start_s=START_S) as running:
        yield running


def engine_pid(stack: RunningStack, worker: str) -> int:
    """The process of vLLM that schedules: the parent of its ranks."""
    children = psutil.Process(stack.pid_of(worker)).children(recursive=True)
    return next(child.pid for child in children if any("EngineCore" in word for word in child.cmdline()))
