"""The event loop takes what has arrived over gRPC, however long it was busy."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import pytest

from services.common.rpc import open_channel

_CALLS = 1000  # more than the bytes that fill a socket pair
_LEFT = 50  # three events each: more than a few bytes, fewer than fill a socket pair


@contextmanager
def _echo_server(may_answer: threading.Event, answered: threading.Semaphore) -> Iterator[str]:
    """The address of a server that echoes once it may; each answer is released to `answered`."""

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        may_answer.wait()
        context.add_callback(answered.release)
        return request

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(4), [grpc.method_handlers_generic_handler("test.Echo", {"Echo": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)


def _echo(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]:
    return channel.unary_unary("/test.Echo/Echo")


def test_a_loop_that_was_busy_takes_all_answers_in_a_few_iterations() -> None:
    may_answer, answered = threading.Event(), threading.Semaphore(0)

    async def calls(address: str) -> int:
        async with open_channel(address) as channel:
            calling = asyncio.gather(*(_echo(channel)(str(number).encode()) for number in range(_CALLS)))
            await asyncio.sleep(0.5)  # all are sent
            may_answer.set()
            for _ in range(_CALLS):  # the loop is busy until the server has ended all
                assert answered.acquire(timeout=60)
            iterations = 0
            while not calling.done():
                time.sleep(0.005)  # noqa: ASYNC251  # the loop stays busy
                await asyncio.sleep(0)
                iterations += 1
            assert await calling == [str(number).encode() for number in range(_CALLS)]
            return iterations

    with _echo_server(may_answer, answered) as address:
        assert asyncio.run(calls(address)) < _CALLS // 4


def test_answers_to_a_closed_loop_keep_none_from_the_next(caplog: pytest.LogCaptureFixture) -> None:
    may_answer, answered = threading.Event(), threading.Semaphore(0)
    left: list[object] = []  # what the closed loop has left behind

    async def leave(address: str) -> None:
        channel = open_channel(address)
        left.extend([channel, *(_echo(channel)(b"left") for _ in range(_LEFT))])
        await asyncio.sleep(0.5)  # all are sent

    async def call(address: str) -> bytes:
        async with open_channel(address) as channel:
            return await asyncio.wait_for(_echo(channel)(b"next"), 20)

    with _echo_server(may_answer, answered) as address:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave(address))
        loop.close()
        may_answer.set()
        for _ in range(_LEFT):
            assert answered.acquire(timeout=60)
        time.sleep(0.5)  # their events wait
        assert asyncio.run(call(address)) == b"next"
    assert "Event loop is closed" in caplog.text
