"""Outputs and progress of requests, when the gateway reads slowly and when it reads at once."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
from ryzanstein.v1 import worker_pb2 as pb

from services.compute.token_logprobs import TokenLogprobs
from services.worker.api.spans import RequestSpans
from services.worker.api.stream_buffer import StreamBuffer
from services.worker.engine.output import MODEL, Finish, Output, Progress
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
