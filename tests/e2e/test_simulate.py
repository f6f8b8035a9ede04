"""`ryzanstein simulate`: a whole installation whose workers compute nothing, and whose every answer is checked."""

from __future__ import annotations

import asyncio
import os
import random
import shlex
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from ryzanstein.v1.worker_pb2 import Sampling
from tokenizers import Tokenizer

from services.cli.stack.default_model import TINY_MODEL
from services.worker.settings import WorkerSettings
from services.worker.simulated.opening import SimulatedModel, open_model
from tests.commands import ROOT, commands
from tests.shell import captured
from tests.stack import RunningStack, running_stack

PAGE = ROOT / "docs" / "simulate.md"
BLOCKS = [command.text.strip().splitlines() for command in commands(PAGE)]
WORKERS = 20


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The second block of the page, as it is typed, but at a free port."""
    record, simulate = next(lines for lines in BLOCKS if len(lines) == 2)
    folder = tmp_path_factory.mktemp("typed")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    typed = ["bash", "-euc", record.replace("curve.json", str(folder / "curve.json"))]
    done = captured(typed, cwd=ROOT, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done
    command, *options = shlex.split(simulate.replace("curve.json", str(folder / "curve.json")))[1:]
    at = options.index("--port")
    options = [*options[:at], *options[at + 2 :]]
    options[0] = str(TINY_MODEL)  # a path from the root of the repository
    with running_stack(tmp_path_factory.mktemp("run"), *options, model="", command=command) as running:
        running.wait_serving(WORKERS)
        yield running


@pytest.fixture(scope="module")
def model() -> SimulatedModel:
    return asyncio.run(open_model(WorkerSettings(model=str(TINY_MODEL), engine="simulated"), TINY_MODEL))


def test_page_begins_with_the_command_that_needs_no_option() -> None:
    assert BLOCKS[0] == ["ryzanstein simulate --workers 100"]


def test_every_answer_of_many_workers_is_right_to_the_byte(stack: RunningStack, model: SimulatedModel) -> None:
    rng = random.Random(0)
    prompts = [[rng.randrange(4, 4000) for _ in range(rng.randrange(1, 200))] for _ in range(60)]
    sampling = Sampling(max_tokens=48, stop_token_ids=model.model.eos_token_ids)
    tokenizer = Tokenizer.from_buffer(model.model.tokenizer_json)

    def answer(prompt: list[int]) -> dict[str, object]:
        response = httpx.post(
            f"{stack.url}/v1/completions",
            json={"model": TINY_MODEL.name, "prompt": prompt, "max_tokens": 48, "temperature": 0},
            timeout=120,
        )
        (choice,) = response.json()["choices"]
        return dict(choice)

    with ThreadPoolExecutor(16) as pool:
        for prompt, choice in zip(prompts, pool.map(answer, prompts), strict=True):
            ids = model.simulation.language.continuation(prompt, sampling)
            ended = ids[-1] in sampling.stop_token_ids
            assert choice["text"] == tokenizer.decode(ids)
            assert choice["finish_reason"] == ("stop" if ended else "length")
    busy = [view for view in stack.workers() if view.state.computed_tokens > 0]
    assert len(busy) == WORKERS


def test_a_chat_streams_words_and_a_grammar_is_refused(stack: RunningStack) -> None:
    body = {"model": TINY_MODEL.name, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
    with httpx.stream("POST", f"{stack.url}/v1/chat/completions", json=body | {"stream": True}, timeout=120) as lines:
        assert [line for line in lines.iter_lines() if line][-1] == "data: [DONE]"
    refused = httpx.post(
        f"{stack.url}/v1/chat/completions", json=body | {"response_format": {"type": "json_object"}}, timeout=120
    )
    assert refused.status_code == httpx.codes.BAD_REQUEST
    assert "simulated worker follows no grammar" in refused.json()["error"]["message"]


@pytest.mark.parametrize("workers", ["0", "2001"])
def test_number_of_workers_is_refused_by_its_option(workers: str, stack: RunningStack) -> None:
    done = stack.ryzanstein("simulate", "--workers", workers)
    assert done.returncode == 2
    assert "--workers" in done.stderr


def test_missing_curve_is_refused_by_its_option(stack: RunningStack, tmp_path: Path) -> None:
    done = stack.ryzanstein("simulate", "--curve", str(tmp_path / "no.json"))
    assert done.returncode == 1
    assert "no.json: no such file" in done.stderr
