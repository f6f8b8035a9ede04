"""The promise of the README's first screen: one command, then any OpenAI client talks to a real model."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from services.cli.stack.default_model import TINY_MODEL
from services.common.ports import free_port
from tests.shell import captured
from tests.stack import COMMAND, RunningStack, running_stack, ryzanstein

TINY = ("--model", str(TINY_MODEL))


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="unused", max_retries=0)


def test_attention_of_a_request_reaches_the_worker(client: openai.OpenAI) -> None:
    """The first token is drawn after the prompt, which attends to all keys."""

    def logprobs(**body: str) -> list[float]:
        prompt = "def f(x):\n    return x + 1\n\n" * 40
        ask = {"model": "ryzanstein-tiny", "prompt": prompt, "max_tokens": 6, "temperature": 0, "logprobs": 0}
        choice = client.completions.create(**ask, extra_body=body).choices[0]
        assert choice.logprobs is not None
        return [float(value) for value in choice.logprobs.token_logprobs or ()]

    dense, narrow = logprobs(), logprobs(attention="window(0, 16)")
    assert dense == logprobs(attention="dense") == logprobs(attention="window(64, 4096)")
    assert (narrow[0], len(narrow)) == (dense[0], len(dense))
    assert narrow != dense
    with pytest.raises(openai.BadRequestError, match=r"`attention` top_k\(9\) is not available.*dense, window"):
        logprobs(attention="top_k(9)")


def test_gateway_freezes_its_startup_objects(stack: RunningStack) -> None:
    """Without it, a full collection is a pause in the middle of every stream."""
    text = httpx.get(f"{stack.url}/metrics", trust_env=False, timeout=60).text
    assert float(re.findall(r"^ryzanstein_process_frozen_objects (.+)$", text, re.MULTILINE)[0]) > 10_000


def test_chat_in_a_pipe_prints_the_answer_alone(stack: RunningStack) -> None:
    answered = captured(
        [COMMAND, "chat", "--url", stack.url, "--max-tokens", "16", "--temperature", "0"], input="What is a list?\n"
    )
    assert answered.returncode == 0, answered.stderr
    ask = {"messages": [{"role": "user", "content": "What is a list?\n"}], "max_tokens": 16, "temperature": 0}
    response = httpx.post(f"{stack.url}/v1/chat/completions", json={"model": stack.model(), **ask}, timeout=300)
    assert answered.stdout == response.json()["choices"][0]["message"]["content"] + "\n"
    assert answered.stderr == ""


@pytest.mark.needs("curl")
def test_printed_curl_line_works_dead_processes_are_restarted_and_ctrl_c_cleans_up(tmp_path: Path) -> None:
    """In one installation, whose start takes longer than all of them. A stopped worker is in the chaos tests."""
    options = ("--api-key", "a-key", "--served-model-name", "mine", "--max-model-len", "512", "--host", "0.0.0.0")
    options += ("--set", "playground=false")
    with running_stack(tmp_path, *options) as stack:
        assert len(processes_of(stack)) >= 7, "supervisor, redis, coordinator, router, gateway, worker, rank"
        shared_before = {p.name for p in Path("/dev/shm").iterdir()}
        assert httpx.get(f"{stack.url}/v1/models", timeout=60).status_code == 401
        assert httpx.get(stack.url, timeout=60).status_code == 404, "the playground is off"
        (model,) = httpx.get(f"{stack.url}/v1/models", headers={"x-api-key": "a-key"}, timeout=60).json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mine", 512)
        # The supervisor's pipe has the line by the time that the installation is stopped.
        curl = (
            f"curl {stack.url}/v1/chat/completions -H 'Content-Type: application/json' "
            '-H "Authorization: Bearer $RYZANSTEIN_API_KEY" '
            """-d '{"model": "mine", "messages": [{"role": "user", "content": "Name the capital of France."}], """
            """"max_tokens": 64}'"""
        )
        assert '"content":' in typed(curl)
        killed = stack.pid_of("kv-coordinator")
        frozen = {name: stack.pid_of(name) for name in ("gateway", "router", "redis")}
        os.kill(killed, signal.SIGKILL)
        for pid in frozen.values():
            os.kill(pid, signal.SIGSTOP)
        for name, pid in {**frozen, "kv-coordinator": killed}.items():
            stack.wait_replaced(name, pid)
        deadline = time.monotonic() + 180
        while not stack.ready():
            assert time.monotonic() < deadline, stack.logs()
            time.sleep(0.1)
        stack.wait_serving(1)
        assert '"content":' in typed(curl)
        tree = processes_of(stack)
        output = stack.stop(signal.SIGINT)
    assert stack.process.returncode == 0
    assert curl in output.splitlines(), output
    assert "worker-0" in output
    assert "rendezvous" in output, "the phase table"
    assert "weights: down, gate, head" in output, "the formats of the weights"
    for name, pid in frozen.items():
        assert f"{name}: process {pid} does not answer and is killed" in output
    assert f"process {killed} does not answer" not in output
    _, alive = psutil.wait_procs(tree, timeout=180)
    assert not alive, f"left behind: {[p.cmdline() for p in alive]}"
    assert {p.name for p in Path("/dev/shm").iterdir()} <= shared_before
    assert not (stack.folder / "stack.json").exists()


def processes_of(stack: RunningStack) -> list[psutil.Process]:
    supervisor = psutil.Process(stack.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def typed(command: str) -> str:
    """The output of a shell."""
    done = captured(["bash", "-c", command], env=os.environ | {"RYZANSTEIN_API_KEY": "a-key"}, check=True)
    return done.stdout


def test_start_time_out_names_the_reason(tmp_path: Path) -> None:
    refused = ryzanstein("up", *TINY, "--port", str(free_port()), "--start-timeout", "1", runtime_dir=tmp_path)
    assert refused.returncode != 0
    (line,) = refused.stderr.strip().splitlines()
    assert re.search(r"not ready after 1 s: .*worker-0 \(.+\).*gateway \(.+\) \(logs: ", line), line


def test_port_in_use_is_reported_on_a_single_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = ryzanstein("up", *TINY, "--port", str(port), runtime_dir=tmp_path)
    assert refused.returncode != 0
    assert refused.stderr.strip().splitlines() == [f"ryzanstein: port {port} is in use; choose another one with --port"]


def without_weights(folder: Path) -> Path:
    folder.mkdir()
    for file in TINY_MODEL.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--model", "broken", "safetensors"),
        ("--set", "max_running=0", "RYZANSTEIN_MAX_RUNNING is '0': it should be greater than or equal to 1"),
        ("--kv-tokens", str(10**11), "memory"),
    ],
)
def test_start_that_fails_is_reported_on_a_single_line(tmp_path: Path, option: str, value: str, words: str) -> None:
    options = (option, str(without_weights(tmp_path / value))) if value == "broken" else (*TINY, option, value)
    refused = ryzanstein("up", *options, "--port", str(free_port()), runtime_dir=tmp_path)
    assert refused.returncode != 0
    (line,) = refused.stderr.strip().splitlines()
    assert words in line
