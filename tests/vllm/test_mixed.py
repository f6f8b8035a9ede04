"""Two pools behind one gateway, on vLLM and on our engine, with a model each: one chat client and two faults."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import httpx
import psutil
import pytest
from openai import AsyncOpenAI

from services.cli.stack.default_model import default_model
from tests.stack import RunningStack
from tests.vllm.installation import START_S, engine_pid, start_worker

pytestmark = pytest.mark.timeout(2 * START_S)
MODELS = {"tiny": "approximate", "ours": "exact"}  # and how they resume a text
STREAMS = 4  # streams per model
TOKENS = {"tiny": 320, "ours": 160}  # tokens per answer: many more than before a fault
UNDER_WAY = 8  # tokens of each stream before a fault


@dataclass(frozen=True)
class Mixed:
    """The installation on vLLM, with two more workers of our own engine."""

    stack: RunningStack
    natives: dict[str, int]  # process ids by worker

    def rank_pid(self, worker: str) -> int:
        """A process that computes for a worker."""
        if worker not in self.natives:
            return engine_pid(self.stack, worker)
        children = psutil.Process(self.natives[worker]).children(recursive=True)
        return next(child.pid for child in children if "services.worker.rank" in child.cmdline())

    def gateway_log(self) -> str:
        return (self.stack.folder / "logs" / "gateway.log").read_text()


@pytest.fixture(scope="module")
def mixed(stack: RunningStack) -> Iterator[Mixed]:
    processes = {f"native-{index}": _native(stack, f"native-{index}") for index in range(2)}
    try:
        stack.wait_serving(4, timeout_s=START_S)
        _wait_listed(stack)
        yield Mixed(stack, {name: process.pid for name, process in processes.items()})
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.wait(60)


def _native(stack: RunningStack, name: str) -> subprocess.Popen[bytes]:
    settings = {"MODEL": default_model().model, "SERVED_MODEL_NAME": "ours", "KV_TOKENS": "8192"}
    return start_worker(stack, name, [sys.executable], settings)


def _wait_listed(stack: RunningStack) -> None:
    """Return once the gateway, which asks the router now and then, knows both models."""
    deadline = time.monotonic() + START_S
    while not MODELS.keys() <= {each["id"] for each in httpx.get(f"{stack.url}/v1/models", timeout=60).json()["data"]}:
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.1)


@dataclass
class ClientAnswer:
    """The part of an answer that the client has."""

    text: str = ""
    pieces: int = 0
    workers: list[dict[str, str | None]] = field(default_factory=list)
    finish: str | None = None
    tokens: int = 0  # by its usage


async def ask(client: AsyncOpenAI, model: str, number: int, answer: ClientAnswer) -> None:
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"Write function number {number} of a module."}],
        max_tokens=TOKENS[model],
        temperature=0,
        stream=True,
        stream_options={"include_usage": True, "include_workers": True},  # type: ignore[typeddict-unknown-key]
        extra_body={"ignore_eos": True, "session_id": f"{model}-{number}"},
    )
    async for chunk in stream:
        answer.tokens = chunk.usage.completion_tokens if chunk.usage else answer.tokens
        for choice in chunk.choices:
            answer.workers += [choice.worker] if hasattr(choice, "worker") else []
            answer.text += choice.delta.content or ""
            answer.pieces += 1
            answer.finish = choice.finish_reason or answer.finish


async def chat(mixed: Mixed, fault: Callable[[str], None] | None = None) -> dict[str, list[ClientAnswer]]:
    """Ask both models at once. Once all answers of a model are under way, `fault` gets its busiest worker."""
    answers = {model: [ClientAnswer() for _ in range(STREAMS)] for model in MODELS}
    async with (
        AsyncOpenAI(base_url=f"{mixed.stack.url}/v1", api_key="unused", max_retries=0, timeout=START_S) as client,
        asyncio.TaskGroup() as group,
    ):
        for model, of_model in answers.items():
            for number, answer in enumerate(of_model):
                group.create_task(ask(client, model, number, answer))
            if fault is not None:
                group.create_task(_strike(of_model, fault))
    for model, of_model in answers.items():
        assert {(answer.finish, answer.tokens) for answer in of_model} == {("length", TOKENS[model])}
    return answers


async def _strike(answers: list[ClientAnswer], fault: Callable[[str], None]) -> None:
    while any(answer.pieces < UNDER_WAY for answer in answers):  # noqa: ASYNC110  # the client says nothing of it
        await asyncio.sleep(0.005)
    fault(_busiest(answers))


def _busiest(answers: list[ClientAnswer]) -> str:
    ((worker, _),) = Counter(str(answer.workers[-1]["id"]) for answer in answers).most_common(1)
    return worker


@pytest.fixture(scope="module")
def undisturbed(mixed: Mixed) -> dict[str, list[ClientAnswer]]:
    return asyncio.run(chat(mixed))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_ranks_of_both_pools_are_lost(mixed: Mixed, undisturbed: dict[str, list[ClientAnswer]], number: int) -> None:
    began = len(mixed.gateway_log())

    before = mixed.stack.resumes()
    answers = asyncio.run(chat(mixed, lambda worker: os.kill(mixed.rank_pid(worker), number)))
    assert (mixed.stack.resumes() - before)["ranks_lost"] >= len(MODELS)
    for model, resume in MODELS.items():
        moved = [answer.workers[-1] for answer in answers[model] if len(answer.workers) > 1]
        assert {worker["resume"] for worker in moved} == {resume}
    texts = [answer.text for answer in answers["ours"]]
    assert texts == [answer.text for answer in undisturbed["ours"]]
    if number == signal.SIGSTOP:
        assert mixed.gateway_log()[began:].count("is stopped by a signal") >= len(MODELS)
    mixed.stack.wait_serving(4, timeout_s=START_S)
