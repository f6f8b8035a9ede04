"""How tokens are passed on: at once while they come slowly, together when they come faster than anybody can read."""

from __future__ import annotations

import asyncio

import pytest
from ryzanstein.v1 import worker_pb2

from services.common.silence import TICK_S
from services.gateway.generation import attempt as module
from services.gateway.generation.attempt import Attempt
from services.gateway.generation.tokens import FinishReason


def new_attempt() -> Attempt:
    return Attempt(1, 0, stall_s=60)


def output(index: int, **fields: object) -> worker_pb2.Output:
    return worker_pb2.Output(request_id="r", attempt=1, first_index=index, ids=[100 + index], **fields)  # type: ignore[arg-type]


async def give_way() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_token_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_S", 3600.0)
    attempt = new_attempt()
    taking = asyncio.create_task(attempt.take())
    await give_way()
    attempt.deliver(output(0))
    assert (await taking).ids == [100]


@pytest.mark.parametrize("lost", [True, False])
async def test_tokens_within_a_frame_go_out_together_and_the_end_ends_the_frame(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr(module, "FRAME_S", 3600.0)
    attempt = new_attempt()
    attempt.deliver(output(0))
    await attempt.take()
    taking = asyncio.create_task(attempt.take())
    for index in (1, 2):
        await give_way()
        attempt.deliver(output(index))
    await give_way()
    assert not taking.done()
    if lost:
        attempt.lose("the worker died", died=True)
    else:
        attempt.deliver(output(3, finish=worker_pb2.FINISH_REASON_LENGTH))
    assert (await taking).ids == [101, 102] if lost else [101, 102, 103]
    assert isinstance(attempt.end, module.Interruption) if lost else attempt.end is FinishReason.LENGTH


async def test_a_frame_ends_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_S", 0.01)
    attempt = new_attempt()
    attempt.deliver(output(0))
    await attempt.take()
    attempt.deliver(output(1))
    assert (await attempt.take()).ids == [101]


def ticks(attempt: Attempt, first: float, seconds: float, *, reported: bool = True) -> bool:
    """Look every tick for so long; returns whether the attempt was given up."""
    return any(attempt.give_up(first + n * TICK_S, reported=reported) for n in range(1, int(seconds / TICK_S) + 1))


def test_an_attempt_is_given_up_without_progress_only_if_its_worker_reports_progress() -> None:
    attempt = Attempt(1, 0, stall_s=5.0)
    assert not ticks(attempt, 0.0, 60.0, reported=False)
    for _ in range(20):
        assert not ticks(attempt, 60.0, 4.0)
        attempt.move_on(worker_pb2.Progress(request_id="r", attempt=1, computed_tokens=32))
    attempt.move_on(worker_pb2.Progress(request_id="r", attempt=2, computed_tokens=64))  # another attempt
    assert not attempt.give_up(10_000.0, reported=True), "this process stood still: what came is still unread"
    assert ticks(attempt, 10_000.0, 6.0)
    assert attempt.end == module.Interruption(
        module.Cause.STALL, "nothing has moved for 5 s, with 32 tokens computed", death=False
    )


def test_an_attempt_ends_at_its_requests_deadline_with_or_without_progress() -> None:
    attempt = Attempt(1, 0, stall_s=60.0, deadline=100.0)
    assert not ticks(attempt, 90.0, 9.0)
    attempt.move_on(worker_pb2.Progress(request_id="r", attempt=1))
    assert ticks(attempt, 99.0, 2.0)
    assert isinstance(attempt.end, module.Late)
