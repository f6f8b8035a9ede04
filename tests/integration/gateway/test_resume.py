"""A stream outlives its workers: the client receives the text it would have received without the fault."""

from __future__ import annotations

import asyncio
import json
import time

import openai
import pytest
from ryzanstein.v1 import routing_pb2, worker_pb2

from tests.integration.gateway.fleet import MODEL, Fault, TcpLine, Worker, scripted_token
from tests.integration.gateway.gateways import GatewayStack, eventually, running_stack
from tests.unit.gateway.made_tokenizers import byte_level

PROMPT = "User: What is a list?"
COUNT = 10
BEGUN, OK, FAULT, HANDOFF = (
    routing_pb2.Outcome.RESULT_BEGUN,
    routing_pb2.Outcome.RESULT_OK,
    routing_pb2.Outcome.RESULT_FAULT,
    routing_pb2.Outcome.RESULT_HANDOFF,
)


def expected_ids(seed: int, count: int = COUNT) -> list[int]:
    prompt = byte_level().encode(PROMPT).ids
    return [scripted_token(prompt, seed, position) for position in range(count)]


async def stream_once(stack: GatewayStack, seed: int, count: int = COUNT) -> tuple[str, list[int], str | None]:
    text, ids, finish = "", [], None
    stream = await stack.client.completions.create(
        model=MODEL, prompt=PROMPT, seed=seed, max_tokens=count, stream=True, extra_body={"return_token_ids": True}
    )
    async for chunk in stream:
        choice = chunk.choices[0]
        text += choice.text
        ids += choice.token_ids
        finish = choice.finish_reason or finish
    return text, ids, finish


async def results(stack: GatewayStack, count: int) -> list[int]:
    await eventually(lambda: len(stack.router.outcomes) >= count)
    return [outcome.result for outcome in stack.router.outcomes]


async def test_hints_of_the_router_reach_the_worker() -> None:
    async with running_stack() as stack:
        stack.router.pull = worker_pb2.PullHint(worker_id="source", incarnation="i", address="source:1", tokens=16)
        stack.router.standby = worker_pb2.Standby(worker_id="standby", address="standby:1")
        await stream_once(stack, seed=1)
        (submit,) = [submit for worker in stack.workers for submit in worker.submits]
        assert (submit.pull, submit.standby) == (stack.router.pull, stack.router.standby)


@pytest.mark.parametrize(
    "kind", ["break", "handoff", "ranks_lost", "failed", "stall", "gap", "repeat", "wrong_attempt", "foreign_finish"]
)
async def test_text_is_unchanged_by_every_fault_at_every_token(kind: str) -> None:
    # Short where it is waited for, and long where a busy machine must not be taken for a stall.
    timeout_s, indices = (1.0, (0, 1, COUNT - 1)) if kind == "stall" else (10.0, range(COUNT))
    async with running_stack(progress_timeout_s=timeout_s) as stack:
        for index in indices:
            for worker in stack.workers:
                worker.faults = [Fault(kind, index)] if worker is stack.workers[0] else []
            text, ids, finish = await stream_once(stack, seed=index)
            if stack.workers[0].faults:  # the router chose another worker first
                text, ids, finish = await stream_once(stack, seed=index)
            if stack.workers[0].faults:
                text, ids, finish = await stream_once(stack, seed=index)
            assert not stack.workers[0].faults, "the fault must have happened"
            assert ids == expected_ids(index)
            assert text == byte_level().decode(ids)
            assert finish == "length"


@pytest.mark.parametrize(("path", "resume"), [("completions", "exact"), ("chat/completions", "approximate")])
async def test_worker_and_resume_kind_are_reported_on_request(path: str, resume: str) -> None:
    card = worker_pb2.ModelCard(resume=resume if resume == "approximate" else "")
    workers = [Worker("w0", faults=[Fault("break", 4)], abilities=card), Worker("w1", abilities=card)]
    ask = {"max_tokens": COUNT, "stream": True, "temperature": 0}
    ask |= {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": PROMPT}]}
    reported: list[dict[str, object]] = []
    async with running_stack(workers) as stack:
        while workers[0].faults:
            sent = {**ask, "stream_options": {"include_workers": True}}
            lines = (await stack.http.post(f"/v1/{path}", json=sent)).text.split("\n")
            events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            reported = [event["choices"][0]["worker"] for event in events if "worker" in event["choices"][0]]
        first, second = (
            {"id": "w0", "attempt": 1, "after": None, "resume": None},
            {"id": "w1", "attempt": 2, "after": "connection_lost", "resume": resume},
        )
        assert reported == [first, second]
        assert (await stack.http.get("/v1/models")).json()["data"][0]["resume"] == resume
        sample = f'ryzanstein_gateway_resumed_streams_total{{model="{MODEL}",resume="{resume}"}} 1.0'
        assert sample in (await stack.http.get("/metrics")).text
        assert '"worker"' not in (await stack.http.post(f"/v1/{path}", json=ask)).text


async def test_resume_carries_the_generated_tokens_and_excludes_the_failed_worker() -> None:
    workers = [Worker("w0", faults=[Fault("break", 4)]), Worker("w1", faults=[Fault("break", 4)])]
    async with running_stack(workers) as stack:
        workers[1].faults.clear()
        while workers[0].faults:
            stack.router.routes.clear()
            workers[1].submits.clear()
            assert (await stream_once(stack, 1))[1] == expected_ids(1)
        second = stack.router.routes[-1]
        assert second.attempt == 2
        assert list(second.excluded_workers) == ["w0"]
        assert second.prompt_tokens == len(byte_level().encode(PROMPT).ids) + 4
        submit = workers[1].submits[-1]
        assert submit.attempt == 2
        assert list(submit.generated_ids) == expected_ids(1)[:4]
        assert submit.sampling.max_tokens == COUNT, "max_tokens counts what was generated before"


async def test_outcomes_are_reported_for_every_attempt() -> None:
    workers = [Worker("w0", faults=[Fault("handoff", 2)])]
    async with running_stack(workers) as stack:
        assert (await stream_once(stack, 2))[1] == expected_ids(2)
        assert await results(stack, 2) == [HANDOFF, OK]
        last = stack.router.outcomes[-1]
        assert (last.worker_id, last.completion_tokens) == ("w0", COUNT)
        assert last.ttft_ms > 0


async def test_the_first_token_of_a_trial_is_reported_while_the_request_runs() -> None:
    worker = Worker("w0", step_s=0.5)
    async with running_stack([worker]) as stack:
        stack.router.trial = True
        running = asyncio.create_task(stream_once(stack, 4, 30))
        assert await results(stack, 1) == [BEGUN]
        assert worker.given < 30
        running.cancel()


async def test_the_only_worker_may_come_back_under_its_name() -> None:
    worker = Worker("w0", step_s=0.1)
    async with running_stack([worker]) as stack:
        running = asyncio.create_task(stream_once(stack, 3, 30))
        await eventually(lambda: worker.given > 3)
        await worker.stop()
        worker.step_s = 0.0
        await asyncio.sleep(0.3)
        await worker.restart()
        assert (await running)[1] == expected_ids(3, 30)
        assert [submit.attempt for submit in worker.submits] == [1, 2]


@pytest.mark.parametrize("kind", ["break", "ranks_died"])
async def test_request_is_poison_when_its_solo_trial_dies_at_the_place_of_two_deaths(kind: str) -> None:
    def poisoned() -> list[Fault]:
        return [Fault(kind, 3) for _ in range(5)]

    workers = [Worker(f"w{i}", faults=poisoned()) for i in range(4)]
    async with running_stack(workers) as stack:
        received: list[int] = []

        async def read() -> None:
            stream = await stack.client.completions.create(
                model=MODEL, prompt=PROMPT, seed=1, max_tokens=COUNT, stream=True,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            async for chunk in stream:
                received.extend(chunk.choices[0].token_ids)

        with pytest.raises(openai.APIError) as failure:
            await read()
        assert received == expected_ids(1)[:3]
        assert failure.value.code == "poison"
        submits = sorted((submit for worker in workers for submit in worker.submits), key=lambda submit: submit.attempt)
        assert [submit.trial_tokens > 0 for submit in submits] == [False, False, True], (
            "no fourth worker is put at risk"
        )


async def test_request_is_no_poison_when_lines_to_its_workers_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the places where three deaths would convict it: the workers' processes live, and are listed as before."""
    monkeypatch.setattr("services.gateway.upstream.router._GONE_S", 2.5)  # no lease is involved
    workers = [Worker(f"w{i}", faults=[Fault("cut", 3)], line=TcpLine(), step_s=0.1) for i in range(3)]
    async with running_stack(workers) as stack:
        assert (await stream_once(stack, 1))[1] == expected_ids(1)
        assert [worker.line.cuts for worker in workers if worker.line] == [1, 1, 1]
        submits = sorted((submit for worker in workers for submit in worker.submits), key=lambda submit: submit.attempt)
        assert [submit.trial_tokens > 0 for submit in submits] == [False, False, True, False]


async def test_suspect_is_retried_when_its_worker_dies_further_on() -> None:
    """Two deaths at one place, then one in the trial, further on: that may be anybody's."""
    worker = Worker("w0", faults=[Fault("break", 3), Fault("break", 3), Fault("break", 5)])
    async with running_stack([worker]) as stack:
        assert (await stream_once(stack, 1, 30))[1] == expected_ids(1, 30)
        assert [submit.trial_tokens > 0 for submit in worker.submits] == [False, False, True, True]


async def test_a_suspect_that_its_worker_had_not_begun_with_is_not_blamed() -> None:
    """Two deaths, then workers that die while the suspect waits there for another one."""
    workers = [Worker(f"w{i}", faults=[Fault("break", 3), Fault("break", 3)], announce_trials=False) for i in range(3)]
    async with running_stack(workers) as stack:
        assert (await stream_once(stack, 1))[1] == expected_ids(1)
        submits = [submit for worker in workers for submit in worker.submits]
        assert sum(submit.trial_tokens > 0 for submit in submits) >= 3


async def test_deaths_far_apart_are_not_poison() -> None:
    worker = Worker("w0", faults=[Fault("break", 5), Fault("break", 90), Fault("break", 170)])
    async with running_stack([worker]) as stack:
        assert (await stream_once(stack, 4, 200))[1] == expected_ids(4, 200)


async def test_a_refusal_is_final() -> None:
    async with running_stack([Worker(f"w{i}", faults=[Fault("refuse", 0)]) for i in range(2)]) as stack:
        answer = await stack.complete(prompt=PROMPT)
        assert answer.status_code == 400
        assert answer.json()["error"] == {
            "message": "does not fit", "type": "invalid_request_error", "param": "max_tokens",
            "code": "context_length_exceeded",
        }  # fmt: skip
        assert sum(len(worker.submits) for worker in stack.workers) == 1


@pytest.mark.parametrize(
    ("kind", "status", "code"), [("mistake", 500, "generation_failed"), ("astray", 400, "grammar_failed")]
)
async def test_unresumable_worker_error_is_returned(kind: str, status: int, code: str) -> None:
    async with running_stack([Worker("w0", faults=[Fault(kind, 2)])]) as stack:
        answer = await stack.complete(prompt=PROMPT, max_tokens=5)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code), error
        assert "does not fit" in error["message"]


async def test_unreachable_worker_only_delays_requests() -> None:
    async with running_stack() as stack:
        await stack.workers[1].stop()
        for seed in range(6):
            assert (await stream_once(stack, seed))[1] == expected_ids(seed)
        assert FAULT in await results(stack, 8)


async def test_parts_of_a_request_queue_only_behind_parts_of_the_same_request() -> None:
    """A batch that is too large to run at once is no reason to refuse it."""
    async with running_stack([Worker("w0", step_s=0.01)]) as stack:
        stack.router.places = 2
        prompts = [f"{PROMPT} {index}" for index in range(12)]
        batch = await stack.complete(prompt=prompts, max_tokens=3, seed=1)
        assert batch.status_code == 200, batch.text
        assert [choice["index"] for choice in batch.json()["choices"]] == list(range(12))
        hello = [{"role": "user", "content": "hi"}]
        choices = await stack.http.post("/v1/chat/completions", json={"messages": hello, "n": 5, "max_tokens": 2})
        assert choices.status_code == 200, choices.text
        embedded = await stack.http.post("/v1/embeddings", json={"input": prompts})
        assert len(embedded.json()["data"]) == 12

        stack.router.busy = True
        for body in ({"prompt": prompts}, {"prompt": PROMPT}):
            assert (await stack.complete(**body)).status_code == 429


async def test_few_parts_of_a_request_are_in_the_routers_queue(stack: GatewayStack) -> None:
    stack.router.queue_s = 30.0
    stack.router.hidden.add("w0")
    sent = asyncio.create_task(stack.complete(prompt=[PROMPT] * 64, max_tokens=1))
    await eventually(lambda: stack.router.queued)
    await asyncio.sleep(0.1)
    assert stack.router.queued == 8
    stack.router.hidden.clear()
    assert (await sent).status_code == 200


async def test_without_any_router_requests_and_running_streams_go_on() -> None:
    async with running_stack([Worker(f"w{i}", step_s=0.1) for i in range(3)]) as stack:
        running = asyncio.create_task(stream_once(stack, 1, 40))
        await eventually(lambda: any(worker.given for worker in stack.workers))
        await stack.router.stop()
        assert not running.done()
        for worker in stack.workers:
            worker.step_s = 0.0
        assert (await running)[1] == expected_ids(1, 40)
        assert (await stream_once(stack, 2))[1] == expected_ids(2)
        # The same session stays on the same worker, and a dead one is left out.
        seen = [len(worker.submits) for worker in stack.workers]
        for _ in range(4):
            answer = await stack.complete(prompt=PROMPT, session_id="s", seed=1)
            assert answer.status_code == 200
        grown = [len(w.submits) - before for w, before in zip(stack.workers, seen, strict=True)]
        assert sorted(grown) == [0, 0, 4]
        chosen = stack.workers[grown.index(4)]
        await chosen.stop()
        assert (await stack.complete(prompt=PROMPT, session_id="s", seed=1)).status_code == 200


async def test_a_gone_client_cancels_its_worker_streaming_or_not() -> None:
    worker = Worker("w0", step_s=0.05)
    async with running_stack([worker]) as stack:
        for streaming in (True, False):
            worker.cancelled.clear()
            body = {"prompt": PROMPT, "max_tokens": 200, "stream": streaming}
            before = len(worker.submits)
            request = asyncio.create_task(stack.http.post("/v1/completions", json=body))
            await eventually(lambda before=before: len(worker.submits) > before)
            request.cancel()
            await eventually(lambda: worker.cancelled)
            assert worker.cancelled == [worker.submits[-1].request_id]


async def test_shared_connection_serves_many_requests_and_unused_workers_have_none() -> None:
    worker, unused = Worker("w0", step_s=0.01), [Worker(f"w{i}") for i in range(1, 9)]
    async with running_stack([worker, *unused]) as stack:
        stack.router.away = {each.worker_id for each in unused}
        answers = await asyncio.gather(*(stream_once(stack, seed) for seed in range(20)))
        assert [ids for _, ids, _ in answers] == [expected_ids(seed) for seed in range(20)]
        assert worker.connections == 1
        assert sum(each.connections for each in unused) == 0


async def test_a_storm_of_resumes_is_cut_off_with_a_clear_error() -> None:
    """Thirty streams lose their worker at once; the other one may be given 100 tokens and 100 more a second."""
    lost, spared = Worker("w0", step_s=0.05), Worker("w1")
    count, rate, patience_s = 120, 100.0, 1.0
    async with running_stack(
        [lost, spared], resume_tokens_per_s=rate, resume_deadline_s=patience_s, refresh_s=30.0
    ) as stack:
        stack.router.away = {"w1"}

        async def resumed(seed: int) -> str | None:
            """None when every token came; else the code of the error."""
            try:
                assert (await stream_once(stack, seed, count))[1] == expected_ids(seed, count)
            except openai.APIError as error:
                return error.code
            return None

        running = [asyncio.create_task(resumed(seed)) for seed in range(30)]
        await eventually(lambda: lost.given > 30 * 10)
        stack.router.away = {"w0"}
        began = time.monotonic()
        await lost.stop()
        ends = await asyncio.gather(*running)
        took_s = max(patience_s, time.monotonic() - began)
        assert set(ends) == {None, "resume_budget"}
        prefilled = [len(submit.prompt_ids) + len(submit.generated_ids) for submit in spared.submits]
        assert len(prefilled) == ends.count(None), "what is refused costs the survivor nothing"
        assert sum(prefilled) <= rate * (1 + took_s) + max(prefilled), "a bucket, and what flows in meanwhile"
        assert (await stream_once(stack, 1))[1] == expected_ids(1), "new requests need no budget"


async def test_a_whole_answer_that_may_not_be_resumed_is_503_with_retry_after() -> None:
    workers = [Worker("w0", faults=[Fault("break", 3), Fault("break", 6)])]
    async with running_stack(workers, resume_tokens_per_s=0.5, resume_deadline_s=1.0) as stack:
        # The first resume takes the bucket into debt: ten tokens and more, at two seconds each.
        first = asyncio.create_task(stack.complete(prompt=PROMPT, max_tokens=COUNT))
        await eventually(lambda: len(stack.router.routes) == 2)
        answer = await stack.complete(prompt=PROMPT, max_tokens=COUNT)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "resume_budget"
        assert int(answer.headers["retry-after"]) > 1
        first.cancel()
