"""A session that must leave its worker takes its KV cache along: through gateway, router, coordinator, two workers."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator

import psutil
import pytest
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, routing_pb2, routing_pb2_grpc

from services.common.rpc import open_channel
from tests.stack import RunningStack, running_stack

PROMPT = [random.Random(7).randrange(300, 4000) for _ in range(1500)]
ASK = {"prompt": PROMPT, "max_tokens": 16, "temperature": 0, "session_id": "moving"}


async def drain_the_holder(stack: RunningStack) -> str:
    """Drain the worker that has computed the prompt, once the coordinator knows of it."""
    async with open_channel(stack.state["coordinator"]) as coordinator, open_channel(stack.state["router"]) as router:
        async with asyncio.timeout(120):
            while True:
                stats = await kv_pb2_grpc.KvCoordinatorStub(coordinator).Stats(kv_pb2.StatsRequest())
                holders = [worker.worker_id for worker in stats.workers if worker.blocks >= len(PROMPT) // 16]
                if holders:
                    break
                await asyncio.sleep(0.05)
        (holder,) = holders
        await routing_pb2_grpc.RouterStub(router).DrainWorker(routing_pb2.DrainWorkerRequest(worker_id=holder))
        return holder


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with running_stack(tmp_path_factory.mktemp("run"), "--workers", "2", "--tensor-parallel", "1") as stack:
        stack.wait_serving(2)
        yield stack


def test_a_drained_workers_session_goes_on_elsewhere_without_computing_its_prompt_again(stack: RunningStack) -> None:
    before = stack.complete(**ASK).json()
    assert before["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    holder = asyncio.run(drain_the_holder(stack))
    deadline = time.monotonic() + 60
    while sum(view.state.prefill_tokens_per_s > 0 for view in stack.workers()) < 2:  # they come with later states
        assert time.monotonic() < deadline
        time.sleep(0.05)
    after = stack.complete(**ASK).json()
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] == len(PROMPT) // 16 * 16, holder


def test_killed_supervisor_leaves_no_processes(stack: RunningStack) -> None:
    children = psutil.Process(stack.process.pid).children(recursive=True)
    stack.process.kill()
    _, alive = psutil.wait_procs(children, timeout=180)
    assert not alive, f"left behind: {[p.cmdline() for p in alive]}"
