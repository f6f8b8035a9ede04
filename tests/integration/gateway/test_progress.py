"""A request is given up when nothing about it moves, and ended when its own time is over; time alone kills none."""

from __future__ import annotations

import asyncio
import json
import re

import grpc
import grpc.aio
import pytest
from ryzanstein.v1 import inference_pb2 as pb
from ryzanstein.v1 import inference_pb2_grpc, routing_pb2

from services.common.ports import free_port
from services.common.rpc import open_channel
from tests.integration.gateway.fleet import MODEL, Fault, Worker
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack

ASK = {"prompt": "User: What is a list?", "max_tokens": 4, "seed": 1}
STALL_S = 1.0


async def failure(stack: GatewayStack, **body: object) -> tuple[int, dict[str, str]]:
    answer = await stack.complete(**(ASK | body))
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize("reports", [True, False], ids=["moving", "of an older worker"])
async def test_a_prompt_outlasts_the_stall_limit(reports: bool) -> None:
    worker = Worker("w0", prefill_s=3.5 * STALL_S, reports=reports)
    async with running_stack([worker], progress_timeout_s=STALL_S) as stack:
        answers = await asyncio.gather(
            stack.complete(**ASK),
            stack.complete(**ASK, stream=True),
            stack.http.post("/v1/embeddings", json={"input": "a"}),
        )
        assert [answer.status_code for answer in answers] == [200] * 3
        assert answers[1].text.rstrip().endswith("[DONE]")
        assert [submit.attempt for submit in worker.submits] == [1] * 3


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("kind", ["stall", "hush"])
async def test_stalled_workers_hand_off_the_request_without_counting_deaths(kind: str, index: int) -> None:
    """`hush`: the whole process is stopped. Three of either kind would make a suspect, if they counted as deaths."""
    workers = [Worker(f"w{n}", faults=[Fault(kind, index)]) for n in range(3)]
    async with running_stack([*workers, Worker("w3")], progress_timeout_s=STALL_S, silence_timeout_s=STALL_S) as stack:
        stack.router.away = {"w3"}
        answering = asyncio.create_task(stack.complete(**ASK))
        await eventually(lambda: all(worker.submits for worker in workers))
        stack.router.away = {"w0", "w1", "w2"}
        answer = await answering
        assert answer.json()["choices"][0]["text"] == (await stack.complete(**ASK)).json()["choices"][0]["text"]
        submits = [submit for worker in stack.workers for submit in worker.submits]
        assert max(submit.attempt for submit in submits) == 4
        assert not any(submit.trial_tokens for submit in submits)


@pytest.mark.parametrize(("kind", "why"), [("stall", "nothing has moved for 1 s"), ("failed", "as planted")])
async def test_a_request_that_no_worker_dies_of_ends_with_its_cause_and_not_as_poison(kind: str, why: str) -> None:
    worker = Worker("w0", faults=[Fault(kind, 0)] * 4)
    async with running_stack([worker], progress_timeout_s=STALL_S) as stack:
        status, error = await failure(stack)
        assert (status, error["code"]) == (500, "generation_failed")
        assert error["message"] == f"The request was interrupted too often, last by {kind}: {why}"
        assert len(worker.submits) == 4
        await eventually(lambda: kind == "failed" or len(worker.cancelled) == 4)


async def test_request_past_its_deadline_gets_its_own_error_and_blames_no_worker() -> None:
    worker, port = Worker("w0", prefill_s=60.0), free_port()
    async with running_stack([worker], request_timeout_s=2.0, grpc_port=port) as stack:
        status, error = await failure(stack)
        assert (status, error["type"], error["code"]) == (504, "timeout_error", "deadline_exceeded")
        far = re.match(
            r"The request's time of 2 s is over, with (\d+) of the prompt's \d+ tokens computed\.", error["message"]
        )
        assert far
        assert int(far[1]) > 0
        await eventually(lambda: worker.cancelled and stack.router.outcomes)
        assert [outcome.result for outcome in stack.router.outcomes] == [routing_pb2.Outcome.RESULT_CANCELLED]

        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(model=MODEL, prompt="a"))
            with pytest.raises(grpc.aio.AioRpcError) as late:
                await anext(aiter(call))
            assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "time of 2 s" in (late.value.details() or "")

        worker.prefill_s, worker.step_s = 0.0, 0.3
        lines = (await stack.complete(**ASK | {"max_tokens": 50}, stream=True)).text.split("\n\n")
        end = json.loads(lines[-3].removeprefix("data: "))
        assert end["error"]["code"] == "deadline_exceeded"
        assert end["usage"]["completion_tokens"] == sum('"text"' in line for line in lines) > 0
        assert {submit.attempt for submit in worker.submits} == {1}


async def test_the_time_of_a_request_passes_in_the_routers_queue_too() -> None:
    worker = Worker("w0")
    async with running_stack([worker], request_timeout_s=1.0) as stack:
        stack.router.queue_s = 30.0
        stack.router.hidden.add("w0")
        status, error = await failure(stack)
        assert (status, error["code"]) == (504, "deadline_exceeded")
        assert not worker.submits
