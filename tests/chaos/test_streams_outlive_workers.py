"""A stream outlives its worker: real processes, real signals, in mid-stream, byte for byte.

What is killed while streams run, ranks and servers, is in test_poison.py.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.chaos.calls import StreamedCall, run_calls
from tests.chaos.conftest import TOKENS
from tests.chaos.streams import ClientStream, SteadyLoad
from tests.stack import RunningStack, running_stack
from tests.unit.compute.model.zoo import write_with_tokenizer

STREAMS = 32
CALLS = 9
PAUSE_S = 8.0  # without a token: 2.5 s of silence and the way to another worker; a stall without it takes 15 s
pytestmark = pytest.mark.timeout(900)


def disturb(stack: RunningStack, reference: list[ClientStream], fault: Callable[[str], None]) -> Counter[str]:
    """Let the fault happen to the worker that computes most streams, while clients ask.

    How many attempts were interrupted, by cause; all answers are those of an undisturbed run.
    """
    load = SteadyLoad(STREAMS, TOKENS)

    async def main() -> None:
        running = asyncio.create_task(load.run(stack))
        try:
            await load.strike(fault, STREAMS // 8)
        finally:
            load.over = True
            await running

    before = stack.resumes()
    asyncio.run(main())
    load.assert_undisturbed(reference)
    return stack.resumes() - before


def test_calls_of_a_killed_worker(stack: RunningStack) -> None:
    """Arguments are also those of an undisturbed run; ids are drawn by the gateway, one for each call."""

    async def main() -> list[StreamedCall]:
        started = asyncio.Event()
        run = asyncio.create_task(run_calls(stack, CALLS, started))
        await started.wait()
        os.kill(stack.pid_of(stack.busiest()), signal.SIGKILL)  # all have begun: no state is older than its death
        return await run

    undisturbed = asyncio.run(run_calls(stack, CALLS))
    before = stack.resumes()
    calls = asyncio.run(main())
    assert (stack.resumes() - before).total()
    for call, expected in zip(calls, undisturbed, strict=True):
        assert json.loads(call.arguments)["notes"]
        assert (call.name, call.arguments, call.finish) == (expected.name, expected.arguments, "tool_calls")
    assert len({call_id for call in calls for call_id in call.ids}) == CALLS
    stack.wait_serving(3)


def counted(stack: RunningStack) -> Counter[str]:
    """The sums of the last hour, from the usage API."""
    query = {"start_time": int(time.time()) - 3600, "bucket_width": "1m", "limit": 1440}
    page = httpx.get(f"{stack.url}/v1/organization/usage/completions", params=query, timeout=120).json()
    names = {"num_model_requests", "input_tokens", "output_tokens"}
    actual = [result for bucket in page["data"] for result in bucket["results"]]
    return Counter({name: sum(result[name] for result in actual) for name in names})


def through_a_kill(stack: RunningStack, expected: str, **body: Any) -> dict[str, Any]:
    """Stream an answer, whose first worker is killed in the middle; return its usage.

    Its text is `expected`, another worker has gone on with it, and it is counted once.
    """
    before = counted(stack)
    options = {"include_usage": True, "include_workers": True}
    streamed = {"model": stack.model(), **body, "stream": True, "stream_options": options}
    text = ""
    workers: list[str] = []
    usage: dict[str, Any] = {}
    with httpx.stream("POST", f"{stack.url}/v1/completions", json=streamed, timeout=120) as events:
        for line in events.iter_lines():
            event = json.loads(line.removeprefix("data: ")) if line.startswith("data: {") else {}
            usage = event.get("usage") or usage
            for choice in event.get("choices", ()):
                text += choice["text"]
                workers += [choice["worker"]["id"]] if "worker" in choice else []
            if len(workers) == 1 and len(text) > 100:
                os.kill(stack.pid_of(workers[0]), signal.SIGKILL)
                workers.append("killed")
    assert text == expected
    assert len(set(workers)) == 3
    assert usage["completion_tokens"] == body["max_tokens"]
    once = {"num_model_requests": 1, "input_tokens": usage["prompt_tokens"], "output_tokens": body["max_tokens"]}
    assert counted(stack) - before == once
    return usage


# Log-probabilities make steps long, so that most of an answer is to come when its worker dies.
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 3, "ignore_eos": True, "logprobs": 1}


def test_a_worker_killed_during_drafts(stack: RunningStack) -> None:
    """The prediction is the answer, so that steps have drafts; the survivor goes on in the middle of one."""
    body = SAMPLED | {"prompt": "class Stack:\n", "max_tokens": 1500}
    expected = stack.complete(**body).json()["choices"][0]["text"]
    usage = through_a_kill(stack, expected, **body, prediction=expected)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    stack.wait_serving(3)


@pytest.mark.parametrize("variant", ["granitemoehybrid", "qwen3_5"])
def test_stream_of_a_model_with_states_outlives_its_killed_worker(variant: str, tmp_path: Path) -> None:
    """The state is gone with the worker, so the survivor computes that of the whole text."""
    model = tmp_path / "hybrid"
    write_with_tokenizer(variant, model, max_position_embeddings=2048)
    body = SAMPLED | {"prompt": "class Stack:\n", "max_tokens": 700}
    with running_stack(tmp_path, "--workers", "2", model=str(model)) as stack:
        stack.wait_serving(2)
        expected = stack.complete(**body).json()["choices"][0]["text"]
        through_a_kill(stack, expected, **body)


def test_a_stopped_rank(stack: RunningStack, reference: list[ClientStream]) -> None:
    def fault(worker: str) -> None:
        (rank,) = stack.rank_pids(worker)
        os.kill(rank, signal.SIGSTOP)

    interrupted = disturb(stack, reference, fault)
    assert interrupted.total()  # on a busy machine gateways may see a stall before the server does
    stack.wait_serving(3)


def test_a_stopped_worker_server(stack: RunningStack, reference: list[ClientStream]) -> None:
    stopped: dict[str, int] = {}

    def fault(worker: str) -> None:
        stopped[worker] = stack.pid_of(worker)
        os.kill(stopped[worker], signal.SIGSTOP)

    late = stack.late_resumes(PAUSE_S)
    interrupted = disturb(stack, reference, fault)
    assert interrupted["connection_lost"], "its heartbeats are missed"
    # By the gateway's clock: many clients in one process read for seconds what has long been sent.
    assert stack.late_resumes(PAUSE_S) == late
    for worker, pid in stopped.items():
        stack.wait_replaced(worker, pid)
    stack.wait_serving(3)


def test_rollout_of_all_workers_under_load_loses_no_tokens(stack: RunningStack, reference: list[ClientStream]) -> None:
    """One worker after the other is asked to end, as in a rollout; the next one when all serve again."""
    load = SteadyLoad(STREAMS // 2, TOKENS)  # workers start under it

    def roll_out() -> None:
        for name in ("worker-0", "worker-1", "worker-2"):
            stack.wait_busy(3)
            before = stack.pid_of(name)
            os.kill(before, signal.SIGTERM)
            stack.wait_replaced(name, before)
            stack.wait_serving(3)

    async def main() -> None:
        running = asyncio.create_task(load.run(stack))
        try:
            await asyncio.to_thread(roll_out)
        finally:
            load.over = True
        await running

    before = stack.resumes()
    asyncio.run(main())
    load.assert_undisturbed(reference)
    assert (stack.resumes() - before)["drain"]


def test_killed_control_services_break_no_stream(stack: RunningStack, reference: list[ClientStream]) -> None:
    """All at once: a stream needs none of them. When they are back, so is everything."""
    victims = {name: stack.pid_of(name) for name in ("router", "kv-coordinator", "redis")}

    def kill(_worker: str) -> None:
        for pid in victims.values():
            os.kill(pid, signal.SIGKILL)

    disturb(stack, reference, kill)
    for name, pid in victims.items():
        stack.wait_replaced(name, pid)
    stack.wait_serving(3)
    answer = stack.complete(prompt="x = ", max_tokens=4)
    assert answer.status_code == 200, answer.text
