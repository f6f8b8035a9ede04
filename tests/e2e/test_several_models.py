"""Several models in one installation: each has its own worker, its name and its weights."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import shlex
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from ryzanstein.v1 import worker_pb2

from services.cli.stack.default_model import TINY_MODEL
from services.worker.native.offline import LLM
from tests.commands import ROOT, commands
from tests.stack import RunningStack, running_stack

REQUESTS = int(os.environ.get("RYZANSTEIN_TEST_REQUESTS", "6"))
NAMES = ["a", "b", "c"]
MAX_TOKENS = 24
SERVING, SLEEPING = worker_pb2.PHASE_SERVING, worker_pb2.PHASE_SLEEPING
PROMPT = "class Stack:\n    def push("


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The arguments of the page's command for models that take turns; its models are copies of the tiny one.

    No GGUF file can hold the tiny model's tokenizer, so a copy that is rounded to 4 bits takes the place of `c.gguf`.
    """
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        shutil.copytree(TINY_MODEL, folder / name)
    every = (command.text.strip() for command in commands(ROOT / "docs" / "several-models.md"))
    for_all, in_turn = (text for text in every if text.startswith("ryzanstein up "))
    assert in_turn == f"{for_all} --max-awake 1 --idle-sleep 5m"
    placed = in_turn.replace("/models/", f"{folder}/").replace("c.gguf", f"{folder}/c:int4")
    program, command, *arguments = shlex.split(placed)
    assert (program, command) == ("ryzanstein", "up")
    return arguments


@pytest.fixture(scope="module")
def stack(typed: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("run"), *typed, "--tensor-parallel", "1", model="") as stack:
        stack.wait_serving(1)
        yield stack


@pytest.fixture(scope="module")
def alone(typed: list[str]) -> dict[str, str]:
    """The continuation by each model, from ranks of its own."""
    texts, models = {}, [model for option, model in itertools.pairwise(typed) if option == "--model"]
    for name, model in zip(NAMES, models, strict=True):
        path, _, quantization = model.partition(":")
        llm = LLM(path, tensor_parallel=1, **({"quantization": quantization} if quantization else {}))
        (texts[name],) = llm.generate([PROMPT], max_tokens=MAX_TOKENS)
        llm.close()
    return texts


def answer(stack: RunningStack, model: str, **fields: object) -> tuple[str, str, list[float]]:
    """The model that answered, and the likeliest continuation with the log-probabilities of its tokens."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "logprobs": 0, **fields}
    reported = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=300).raise_for_status().json()
    (choice,) = reported["choices"]
    return reported["model"], choice["text"], choice["logprobs"]["token_logprobs"]


@pytest.mark.timeout(600 + 5 * REQUESTS)
def test_each_model_answers_as_alone_and_only_as_many_as_allowed_are_awake(
    stack: RunningStack, alone: dict[str, str]
) -> None:
    assert phases(stack) == [SERVING, SLEEPING, SLEEPING], "the first model is awake at the start"
    listed = httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]
    assert sorted(model["id"] for model in listed) == sorted(NAMES)
    expected = {name: answer(stack, name) for name in NAMES}
    assert [(model, text) for model, text, _ in expected.values()] == list(alone.items())
    assert len({tuple(logprobs) for _, _, logprobs in expected.values()}) == len(NAMES), "differently rounded weights"
    order = random.Random(53).choices(NAMES, k=REQUESTS)
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda name: answer(stack, name), order))
    assert answers == [expected[name] for name in order]
    assert sorted(phases(stack)) == [SERVING, SLEEPING, SLEEPING]
    assert answer(stack, "b", keep_alive=0) == expected["b"]
    wait_asleep(stack)
    wait_given_back(stack, 150)
    assert answer(stack, "b", keep_alive="5m") == expected["b"]


def test_model_without_a_worker_is_refused_with_the_served_names(stack: RunningStack) -> None:
    refused = httpx.post(f"{stack.url}/v1/completions", json={"model": "d", "prompt": PROMPT}, timeout=60)
    assert refused.status_code == 404
    assert all(name in refused.json()["error"]["message"] for name in NAMES)


def mapped_mib(stack: RunningStack, worker: str) -> float:
    """MiB of a worker's processes, with the pages of mapped files (RSS)."""
    processes = [stack.pid_of(worker), *stack.rank_pids(worker)]
    return sum(psutil.Process(pid).memory_info().rss for pid in processes) / (1 << 20)


def wait_given_back(stack: RunningStack, most_mib: float, timeout_s: float = 180) -> None:
    """Return once each worker has less memory; a worker says that it sleeps before its ranks have given theirs back."""
    deadline = time.monotonic() + timeout_s
    while max(sizes := [mapped_mib(stack, f"worker-{number}") for number in range(len(NAMES))]) >= most_mib:
        assert time.monotonic() < deadline, sizes
        time.sleep(0.1)


def wait_asleep(stack: RunningStack, timeout_s: float = 180) -> None:
    """Return once every model sleeps, by the list of models."""
    deadline = time.monotonic() + timeout_s
    while {model["phase"] for model in httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]} != {"sleeping"}:
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.1)


def phases(stack: RunningStack) -> list[worker_pb2.Phase]:
    return [view.state.phase for view in sorted(stack.workers(), key=lambda view: view.worker_id)]


def test_status_and_logs_tell_the_workers_of_models_apart(stack: RunningStack) -> None:
    shown = json.loads(stack.ryzanstein("status", "--port", str(stack.port), "--json").stdout)["router"]["workers"]
    assert {worker["worker_id"]: worker["model"] for worker in shown} == {
        f"worker-{index}": name for index, name in enumerate(NAMES)
    }
    for index in range(len(NAMES)):
        assert (stack.folder / "logs" / f"worker-{index}.log").stat().st_size
    printed = stack.stop()
    assert "Models: a, b, c." in printed
    rows = re.findall(r"worker-(\d)\W+(a|b|c)\b", printed)
    assert rows == [(str(index), name) for index, name in enumerate(NAMES)]
