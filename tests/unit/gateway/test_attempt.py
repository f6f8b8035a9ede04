"""How tokens are passed on: at once while they come slowly, together when they come faster than anybody can read."""

from __future__ import annotations

import asyncio

import pytest
from ryzanstein.v1 import worker_pb2

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


async def test_tokens_within_a_frame_go_out_together_and_the_end_ends_the_frame(
    monkeypatch: pytest.MonkeyPatch,
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
    attempt.deliver(output(3, finish=worker_pb2.FINISH_REASON_LENGTH))
    assert (await taking).ids == [101, 102, 103]
    assert attempt.end is FinishReason.LENGTH


async def test_a_lost_connection_ends_the_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_S", 3600.0)
    attempt = new_attempt()
    attempt.deliver(output(0))
    await attempt.take()
    taking = asyncio.create_task(attempt.take())
    await give_way()
    attempt.deliver(output(1))
    await give_way()
    attempt.lose("the worker died", died=True)
    assert (await taking).ids == [101]
    assert isinstance(attempt.end, module.Interruption)


async def test_a_frame_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FRAME_S", 0.01)
    attempt = new_attempt()
    attempt.deliver(output(0))
    await attempt.take()
    attempt.deliver(output(1))
    assert (await attempt.take()).ids == [101]
