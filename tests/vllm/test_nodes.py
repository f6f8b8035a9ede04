"""Two processes as the machines of one worker: a rank in each, by vLLM's multi-node mode."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack
from tests.vllm.installation import PYTHON, START_S, start_worker

LEADER, FOLLOWER = "node-0", "node-1"
OWN_HOSTS = ("unshare", "--user", "--map-root-user", "--mount")
pytestmark = [
    pytest.mark.timeout(3 * START_S),
    pytest.mark.skipif(
        shutil.which("unshare") is None or subprocess.run([*OWN_HOSTS, "true"], capture_output=True).returncode != 0,
        reason="names of hosts for these processes alone take a namespace, which this machine refuses",
    ),
]
SETTINGS = {
    "MODEL": str(TINY_MODEL),
    "SERVED_MODEL_NAME": "pair",
    "KV_TOKENS": "8192",
    "DTYPE": "float32",
    "ENGINE": "vllm",
    "ENGINE_ARGS": '{"enforce_eager": true, "block_size": 32}',
    "TENSOR_PARALLEL": "2",
    "NODES": "2",
    "RECOVERY_LIMIT_S": str(2 * START_S),
}


@pytest.fixture
def machines(stack: RunningStack, tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    hosts = tmp_path / "hosts"
    hosts.write_text(f"127.0.0.1 localhost {LEADER} {FOLLOWER}\n")
    python = [*OWN_HOSTS, "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$0" "$@"', PYTHON]
    processes = {name: start_worker(stack, name, python, SETTINGS) for name in (LEADER, FOLLOWER)}
    yield processes
    for process in processes.values():
        process.terminate()
    for process in processes.values():
        process.wait(60)


def test_a_worker_of_two_machines_answers_and_starts_again(
    stack: RunningStack, machines: dict[str, subprocess.Popen[bytes]]
) -> None:
    wait_started(stack, times=1)
    alone = answer(stack, "tiny")
    assert_same(answer(stack, "pair"), alone)
    rank_of(machines[FOLLOWER]).kill()
    wait_started(stack, times=2)
    assert "node 1 is lost" in log_of(stack, LEADER)
    assert_same(answer(stack, "pair"), alone)


def wait_started(stack: RunningStack, times: int) -> None:
    """Return once the worker has started so many times, and gets work."""
    deadline = time.monotonic() + START_S
    while not (log_of(stack, LEADER).count("phase serving") >= times and gets_work(stack)):
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.5)


def gets_work(stack: RunningStack) -> bool:
    return any(view.eligible for view in stack.workers() if view.worker_id == LEADER)


def log_of(stack: RunningStack, name: str) -> str:
    return (stack.folder / "logs" / f"{name}.log").read_text()


def answer(stack: RunningStack, model: str) -> tuple[list[str], list[float]]:
    """Greedy tokens and their log-probabilities."""
    body = {"model": model, "prompt": "def f(x):", "max_tokens": 24, "temperature": 0, "logprobs": 1}
    response = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=300).raise_for_status()
    actual = response.json()["choices"][0]["logprobs"]
    return actual["tokens"], actual["token_logprobs"]


def assert_same(one: tuple[list[str], list[float]], other: tuple[list[str], list[float]]) -> None:
    """But for the last bits, which depend on the number of ranks."""
    assert one[0] == other[0]
    assert one[1] == pytest.approx(other[1], abs=1e-3)


def rank_of(machine: subprocess.Popen[bytes]) -> psutil.Process:
    children = psutil.Process(machine.pid).children(recursive=True)
    return next(child for child in children if any("Worker_TP" in word for word in child.cmdline()))
