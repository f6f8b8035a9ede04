"""The page that newcomers read first is true: its example runs, and answers as the engine of the server does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from ast import literal_eval

import psutil
import pytest
from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from services.worker.engine.errors import TooLongError
from services.worker.native import offline
from services.worker.native.offline import open_offline
from services.worker.process.rank_group import RanksFailedError
from tests.integration.worker_engine.engines import SETTINGS, native
from tests.integration.worker_engine.test_conformance import LENGTH, PROMPT, ask, complete
from tests.models import BUNDLED_MODEL

PROJECT = BUNDLED_MODEL.parents[1]


def example() -> str:
    """The first indented block of the page."""
    lines = (offline.__doc__ or "").splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("    "))
    end = next(at for at, line in enumerate(lines) if at > begin and line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[begin:end]))


def test_the_example_runs() -> None:
    ran = subprocess.run([sys.executable, "-c", example()], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    answers = [literal_eval(line) for line in ran.stdout.splitlines() if line.startswith(("'", '"'))]
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    for answer, text in zip(answers, ("def fibonacci(n):", "The capital of France is"), strict=True):
        assert answer.startswith(text)
        assert len(tokenizer.encode(answer).ids) > len(tokenizer.encode(text).ids) + 4


async def test_it_answers_as_the_engine_of_the_server_does() -> None:
    async with open_offline(SETTINGS) as engine:
        one, other = await engine.generate([PROMPT, [7, *PROMPT]], Sampling(max_tokens=LENGTH))
        with pytest.raises(TooLongError):
            await engine.generate([[5] * 600], Sampling(max_tokens=1))
    async with native() as server:
        assert (await complete(server, ask())).ids == one
        assert (await complete(server, ask([7, *PROMPT]))).ids == other


async def test_lost_ranks_end_it() -> None:
    async with open_offline(SETTINGS) as engine:
        below = psutil.Process().children(recursive=True)
        rank = [process for process in below if "services.worker.rank" in process.cmdline()][-1]  # below a launcher
        answers = asyncio.create_task(engine.generate([PROMPT], Sampling(max_tokens=450)))
        rank.kill()
        with pytest.raises(RanksFailedError, match="SIGKILL"):
            await answers
