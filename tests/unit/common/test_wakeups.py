"""The event loop takes what has arrived over gRPC, however long it was busy."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from services.common.rpc import open_channel

_CALLS = 1000  # more than the bytes that fill a socket pair


def test_a_loop_that_was_busy_takes_all_answers_in_a_few_iterations() -> None:
    may_answer, answered = threading.Event(), threading.Semaphore(0)

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        may_answer.wait()
        context.add_callback(answered.release)
        return request

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(4), [grpc.method_handlers_generic_handler("test.Echo", {"Echo": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def calls() -> int:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            echo: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Echo")
            calling = asyncio.gather(*(echo(str(number).encode()) for number in range(_CALLS)))
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

    try:
        assert asyncio.run(calls()) < _CALLS // 4
    finally:
        server.stop(None)
