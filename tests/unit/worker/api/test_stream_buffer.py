"""What is said of requests that move on without outputs, when the gateway reads slowly and when it reads at once."""

from __future__ import annotations

from unittest.mock import Mock

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.stream_buffer import StreamBuffer
from services.worker.engine.output import Output, Progress
from services.worker.engine.request import EngineRequest


def request(name: str) -> EngineRequest:
    return EngineRequest(name, [1], pb.Sampling(), attempt=3)


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
