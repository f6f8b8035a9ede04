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
from tests.integration.worker_engine.answers import LENGTH, PROMPT, ask, complete
from tests.integration.worker_engine.engines import SETTINGS, native
from tests.models import BUNDLED_MODEL

PROJECT = BUNDLED_MODEL.parents[1]


def example() -> str:
    """The first indented block of the page."""
    lines = (offline.__doc__ or "").splitlines()
    begin = next(at for at, line in enumerate(lines) if line.startswith("    "))
    end = next(at for at, line in enumerate(lines) if at > begin and line and not line.startswith("    "))
    return textwrap.dedent("\n".join(lines[begin:end]))


def test_example_of_the_module_completes_both_texts() -> None:
    ran = subprocess.run([sys.executable, "-c", example()], cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stderr) == (0, "")
    answers = literal_eval(ran.stdout)
    tokenizer = Tokenizer.from_file(str(BUNDLED_MODEL / "tokenizer.json"))
    assert [len(tokenizer.encode(answer).ids) > 4 for answer in answers] == [True, True]


def test_llm_samples_by_keyword_and_ends_its_ranks_when_closed() -> None:
    others = psutil.Process().children(recursive=True)
    llm = offline.LLM(str(BUNDLED_MODEL), kv_tokens=1024)
    ranks = [process for process in psutil.Process().children(recursive=True) if process not in others]
    assert ranks
    greedy, again = (llm.generate(["def add(a, b):"], max_tokens=8) for _ in range(2))
    assert greedy == again
    seeded = [llm.generate(["def add(a, b):"], max_tokens=8, temperature=2.0, seed=seed) for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    with pytest.raises(ValueError, match="heat"):
        llm.generate(["x"], heat=1.0)
    llm.close()
    assert not any(process.is_running() for process in ranks)


async def test_offline_answers_equal_server_answers() -> None:
    async with open_offline(SETTINGS) as engine:
        one, other = await engine.generate([PROMPT, [7, *PROMPT]], Sampling(max_tokens=LENGTH))
        with pytest.raises(TooLongError):
            await engine.generate([[5] * 600], Sampling(max_tokens=1))
    async with native() as server:
        assert (await complete(server, ask())).ids == one
        assert (await complete(server, ask([7, *PROMPT]))).ids == other


async def test_lost_ranks_end_generate() -> None:
    others = psutil.Process().children(recursive=True)  # ranks of other tests, ended or not
    async with open_offline(SETTINGS) as engine:
        below = [process for process in psutil.Process().children(recursive=True) if process not in others]
        rank = [process for process in below if "services.worker.rank" in process.cmdline()][-1]  # below a launcher
        answers = asyncio.create_task(engine.generate([PROMPT], Sampling(max_tokens=450)))
        rank.kill()
        with pytest.raises(RanksFailedError, match="SIGKILL"):
            await answers
