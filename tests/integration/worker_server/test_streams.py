"""A worker's promises to gateways, over real gRPC and Redis, on ranks whose tokens are known beforehand."""

from __future__ import annotations

import asyncio

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from tests.integration.worker_server.conftest import RunningWorker, running_worker
from tests.integration.worker_server.gateway import FakeGateway, until
from tests.unit.worker.scheduling.fake_ranks import generate

GREEDY = pb.Sampling()


async def test_tokens_match_the_model_and_end_with_a_finish_reason(gateway: FakeGateway) -> None:
    await gateway.send(pb.ConnectFrame())  # a frame of a newer protocol version
    answers = [await gateway.submit([i, 5, 9], max_tokens=20) for i in range(20)]
    for i, answer in enumerate(answers):
        await asyncio.wait_for(answer.end.wait(), 60)
        assert answer.ids == generate([i, 5, 9], 20, GREEDY)
        assert answer.last.finish == pb.FINISH_REASON_LENGTH


async def test_message_carries_the_tokens_of_a_whole_step(worker: RunningWorker, gateway: FakeGateway) -> None:
    before = worker.group.n_steps
    answers = [await gateway.submit([i, 1], max_tokens=50) for i in range(8)]
    await asyncio.gather(*(answer.end.wait() for answer in answers))
    assert gateway.messages <= worker.group.n_steps - before


async def test_a_context_that_is_too_short_for_the_probe_is_served(redis_url: str) -> None:
    async with running_worker(redis_url, max_model_len=8) as worker, FakeGateway(worker.address) as gateway:
        await gateway.wait_serving()
        assert (await gateway.complete([1, 2], max_tokens=3)).ids == generate([1, 2], 3, GREEDY)


async def test_a_suspect_is_announced_before_its_tokens(gateway: FakeGateway) -> None:
    answer = await gateway.complete([1, 2], trial_tokens=2)
    assert [output.on_trial for output in answer.outputs][:2] == [True, False]
    assert not answer.outputs[0].ids
    assert answer.ids == generate([1, 2], 5, GREEDY)
    assert not any(output.on_trial for output in (await gateway.complete([1, 2])).outputs)


async def test_an_adapter_without_slots_is_refused_by_its_field(gateway: FakeGateway) -> None:
    answer = await gateway.complete([1, 2], adapter=pb.Adapter(digest="d", source="/adapters/d", name="d"))
    assert answer.last.error.field == "adapter"
    assert "no slots for adapters (RYZANSTEIN_ADAPTER_SOURCES)" in answer.last.error.message


async def test_broken_stream_cancels_only_its_own_requests(worker: RunningWorker) -> None:
    async with FakeGateway(worker.address) as staying:
        await staying.wait_serving()
        mine = await staying.submit([3] * 20, max_tokens=200)
        async with FakeGateway(worker.address) as leaving:
            theirs = [await leaving.submit([i] * 20, max_tokens=230) for i in range(5)]
            await theirs[0].at_least(1)
        await staying.wait_state(lambda state: state.running <= 1)
        await mine.end.wait()
        assert mine.ids == generate([3] * 20, 200, GREEDY)


async def test_a_malformed_submit_names_its_field(gateway: FakeGateway) -> None:
    for field, submit in (
        ("prompt_ids", {"prompt": []}),
        ("prompt_ids", {"prompt": [1, 97]}),
        ("generated_ids", {"prompt": [1], "generated_ids": [4_000_000_000]}),
        ("sampling.top_p", {"prompt": [1], "sampling": pb.Sampling(top_p=1.5)}),
        ("sampling.temperature", {"prompt": [1], "sampling": pb.Sampling(temperature=-0.1)}),
        ("sampling.temperature", {"prompt": [1], "sampling": pb.Sampling(temperature=float("nan"))}),
        ("sampling.min_p", {"prompt": [1], "sampling": pb.Sampling(min_p=2)}),
        ("sampling.logit_bias", {"prompt": [1], "sampling": pb.Sampling(logit_bias={97: 1.0})}),
        ("sampling.logprobs", {"prompt": [1], "sampling": pb.Sampling(logprobs=1000)}),
        ("sampling.min_tokens", {"prompt": [1], "sampling": pb.Sampling(max_tokens=2, min_tokens=3)}),
        ("sampling.stop_token_ids", {"prompt": [1], "sampling": pb.Sampling(stop_token_ids=[97])}),
        ("sampling.repetition_penalty", {"prompt": [1], "sampling": pb.Sampling(repetition_penalty=1e-38)}),
        ("weight", {"prompt": [1], "weight": 5000}),
        ("request_id", {"prompt": [1], "request_id": ""}),
    ):
        neighbour = await gateway.submit([8, 8], max_tokens=30)
        answer = await gateway.complete(**submit)
        assert answer.last.error.code == pb.RequestError.CODE_INVALID_ARGUMENT
        assert answer.last.error.field == field
        await neighbour.end.wait()
        assert neighbour.ids == generate([8, 8], 30, GREEDY)


async def test_oversized_request_is_rejected_with_the_largest_size(gateway: FakeGateway) -> None:
    most = (await gateway.state()).max_request_tokens
    assert most == 256
    answer = await gateway.complete([1] * most)
    assert answer.last.error.code == pb.RequestError.CODE_TOO_LONG
    assert answer.last.error.field == "prompt_ids"
    assert str(most - 1) in answer.last.error.message
    fits = await gateway.complete([1] * (most - 1), max_tokens=0)
    assert len(fits.ids) == 1


async def test_slow_reader_gets_merged_messages_with_every_token(worker: RunningWorker, gateway: FakeGateway) -> None:
    worker.group.step_s = 0
    stream = gateway.stub.Connect()
    for i in range(8):
        submit = pb.Submit(request_id=str(i), attempt=1, prompt_ids=[i], sampling=pb.Sampling(max_tokens=240))
        submit.sampling.ignore_eos = True
        await stream.write(pb.ConnectFrames(frames=[pb.ConnectFrame(submit=submit)]))
    await gateway.wait_state(lambda state: state.running == state.waiting == 0 and state.kv_blocks_cached > 0)
    ids: dict[str, list[int]] = {}
    async for message in stream:
        for output in message.outputs:
            assert output.first_index == len(ids.setdefault(output.request_id, []))
            ids[output.request_id] += output.ids
        if all(len(ids.get(str(i), [])) == 240 for i in range(8)):
            break
    assert ids == {str(i): generate([i], 240, GREEDY) for i in range(8)}
    stream.cancel()


@pytest.mark.parametrize("wanted_ms", [0, 100])
async def test_heartbeats_are_sent_on_an_idle_stream_only_on_request(
    worker: RunningWorker, gateway: FakeGateway, wanted_ms: int
) -> None:
    stream = gateway.stub.Connect()
    hello = pb.Hello(gateway_id="another", heartbeat_ms=wanted_ms)
    await stream.write(pb.ConnectFrames(frames=[pb.ConnectFrame(hello=hello)]))
    messages: list[pb.StepOutputs] = []

    async def read() -> None:
        async for message in stream:
            messages.append(message)  # noqa: PERF401  # seen one by one

    reading = asyncio.create_task(read())
    await (until(lambda: messages) if wanted_ms else asyncio.sleep(0.5))
    assert [message.heartbeat for message in messages] == [True] * bool(wanted_ms), "the first one, while idle"
    worker.group.step_s = 3600.0
    submit = pb.Submit(request_id="slow", attempt=1, prompt_ids=[7] * 20, sampling=pb.Sampling(max_tokens=1))
    await stream.write(pb.ConnectFrames(frames=[pb.ConnectFrame(submit=submit)]))
    await (until(lambda: len(messages) >= 5) if wanted_ms else asyncio.sleep(0.5))
    assert not any(message.outputs for message in messages)
    assert wanted_ms or not messages
    stream.cancel()
    await asyncio.gather(reading, return_exceptions=True)
