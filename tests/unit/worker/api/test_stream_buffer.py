"""Outputs and progress of requests, when the gateway reads slowly and when it reads at once."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.compute.token_logprobs import TokenLogprobs
from services.worker.api.spans import RequestSpans
from services.worker.api.stream_buffer import StreamBuffer
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.output import MODEL, Finish, Output, Prefill, Progress
from services.worker.engine.request import AdapterRef, EngineRequest


def request(name: str) -> EngineRequest:
    return EngineRequest(name, [1], pb.Sampling(), attempt=3)


async def test_outputs_of_several_steps_are_merged_and_their_counts_added() -> None:
    drafted, plain = request("drafted"), request("plain")
    buffer = StreamBuffer(RequestSpans(), lambda _: None, lambda _: Progress(0, 0))
    scores = [TokenLogprobs(token_id, -1.0, 1, (), ()) for token_id in range(10)]
    buffer.add(drafted, Output(4, (4, 5, 6), logprobs=tuple(scores[4:7]), accepted_prediction=2))
    buffer.add(drafted, Output(7, (7,), logprobs=(scores[7],), rejected_prediction=3))
    buffer.add(drafted, Output(8, (8, 9), Finish.STOP, logprobs=tuple(scores[8:]), accepted_prediction=1))
    buffer.add(plain, Output(0, (1, 2)))
    buffer.flush(1)
    merged, other = (await buffer.take()).outputs
    assert (merged.first_index, list(merged.ids)) == (4, [4, 5, 6, 7, 8, 9])
    assert [row.token_id for row in merged.logprobs] == list(merged.ids)
    assert (merged.accepted_prediction_tokens, merged.rejected_prediction_tokens) == (3, 3)
    assert merged.finish == pb.FINISH_REASON_STOP
    assert other == pb.Output(request_id="plain", attempt=3, ids=[1, 2]), "a count of zero is not written"


async def test_progress_is_one_entry_for_each_request_without_outputs() -> None:
    moving, still, answered = (request(name) for name in ("moving", "still", "answered"))
    computed = {moving: 0, still: 7, answered: 0}
    buffer = StreamBuffer(Mock(), lambda _: None, lambda one: Progress(computed[one], computed[one]))
    buffer.live = {one.request_id: one for one in computed}
    for _ in range(5):  # the gateway reads nothing meanwhile
        computed[moving] += 16
        buffer.add(answered, Output(0, (5,)))
        buffer.beat_if_due()
    message = await buffer.take()
    assert message.heartbeat
    assert message.reports_progress
    assert [(one.request_id, one.attempt, one.computed_tokens) for one in message.progress] == [
        ("moving", 3, 80),
        ("still", 3, 7),  # it has come
    ]
    computed[moving] += 16
    buffer.beat_if_due()
    assert [(one.request_id, one.computed_tokens) for one in (await buffer.take()).progress] == [("moving", 96)]
    buffer.beat_if_due()
    assert [one.request_id for one in (await buffer.take()).progress] == ["answered"], "silent since its last output"
    buffer.beat_if_due()
    buffer.beat_if_due()
    message = await buffer.take()
    assert message.heartbeat
    assert not message.progress


@pytest.mark.parametrize(
    ("field", "adapter", "code", "message"),
    [
        ("grammar", None, pb.RequestError.CODE_GRAMMAR, "why"),
        ("sampling.seed", None, pb.RequestError.CODE_INVALID_ARGUMENT, "why"),
        (MODEL, None, pb.RequestError.CODE_INTERNAL, "why"),
        (
            MODEL,
            AdapterRef("0f", "/adapters/mine", "mine"),
            pb.RequestError.CODE_INVALID_ARGUMENT,
            "adapter 'mine': why",
        ),
    ],
)
async def test_failed_request_has_the_code_of_its_cause(
    field: str, adapter: AdapterRef | None, code: pb.RequestError.Code, message: str
) -> None:
    buffer = StreamBuffer(RequestSpans(), lambda _: None, lambda _: Progress(0, 0))
    failed = EngineRequest("failed", [1], pb.Sampling(), adapter=adapter)
    buffer.add(failed, Output(0, (5,), Finish.FAILED, failure="why", failed_field=field))
    buffer.flush(1)
    (output,) = (await buffer.take()).outputs
    assert output.error == pb.RequestError(code=code, field=field, message=message)
    assert list(output.ids) == [5]


def decode(index: int, finish: Finish | None = None) -> Output:
    return Output(index, (index,), finish)


async def test_quick_steps_share_a_message_and_an_end_waits_for_none() -> None:
    """The time between messages never comes: only what is urgent ends the wait."""
    one, other = request("one"), request("other")
    buffer = StreamBuffer(RequestSpans(), lambda _: None, lambda _: Progress(0, 0), merge_s=3600.0)
    buffer.add(one, decode(0))
    buffer.flush(1)
    assert [list(each.ids) for each in (await buffer.take()).outputs] == [[0]], "there was no message before"
    taking = asyncio.create_task(buffer.take())
    for step in (1, 2, 3):
        buffer.add(one, decode(step))
        buffer.flush(step)
        await asyncio.sleep(0)
        assert not taking.done()
    buffer.add(other, Output(0, (9,), prefill=Prefill(0.0, 0.0)))
    buffer.flush(4)
    message = await taking
    assert message.step == 4
    assert [list(each.ids) for each in message.outputs] == [[1, 2, 3], [9]], "a first token takes the others along"
    taking = asyncio.create_task(buffer.take())
    buffer.add(one, decode(4))
    buffer.flush(5)
    await asyncio.sleep(0)
    assert not taking.done()
    buffer.add(one, decode(5, Finish.LENGTH))
    buffer.flush(6)
    assert [list(each.ids) for each in (await taking).outputs] == [[4, 5]]


@pytest.mark.parametrize("urgent", ["beat", "wake", "hand_off", "refuse", "announce_trial"])
async def test_merged_steps_go_with_all_that_is_urgent(urgent: str) -> None:
    one = request("one")
    buffer = StreamBuffer(RequestSpans(), lambda _: None, lambda _: Progress(0, 0), merge_s=3600.0)
    for step in (0, 1):
        buffer.add(one, decode(step))
        buffer.flush(step)
        if step == 0:
            await buffer.take()
    taking = asyncio.create_task(buffer.take())
    await asyncio.sleep(0)
    assert not taking.done()
    refusal = InvalidRequestError("field", "message")
    arguments = {"hand_off": (one, pb.Handoff()), "refuse": (one, refusal), "announce_trial": (one,)}
    getattr(buffer, urgent)(*arguments.get(urgent, ()))
    buffer.flush(2)
    assert list((await taking).outputs[0].ids) == [1]
