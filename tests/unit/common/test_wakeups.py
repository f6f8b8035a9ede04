"""The event loop of a service takes what has arrived over gRPC, however long it was busy."""

from __future__ import annotations

import asyncio
import multiprocessing
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import grpc

from services.common.lifecycle import run_service
from services.common.rpc import open_channel
from services.common.settings import ServiceSettings

_CALLS = 1000  # more than the bytes that fill a socket pair


def iterations_of_a_busy_service() -> int:
    """Iterations that a service's loop takes for the answers to its calls."""
    may_answer, answered = threading.Event(), threading.Semaphore(0)
    iterations = 0

    def answer(request: bytes, context: grpc.ServicerContext) -> bytes:
        may_answer.wait()
        context.add_callback(answered.release)
        return request

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.server(ThreadPoolExecutor(4), [grpc.method_handlers_generic_handler("test.Echo", {"Echo": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()

    async def calls(settings: ServiceSettings, stop: asyncio.Event) -> None:
        nonlocal iterations
        async with open_channel(f"127.0.0.1:{port}") as channel:
            echo: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Echo/Echo")
            calling = asyncio.gather(*(echo(str(number).encode()) for number in range(_CALLS)))
            await asyncio.sleep(0.5)  # all are sent
            may_answer.set()
            for _ in range(_CALLS):  # the loop is busy until the server has ended all
                assert answered.acquire(timeout=60)
            while not calling.done():
                time.sleep(0.005)  # noqa: ASYNC251  # the loop stays busy
                await asyncio.sleep(0)
                iterations += 1
            assert await calling == [str(number).encode() for number in range(_CALLS)]

    run_service("test", ServiceSettings, calls)
    server.stop(None)
    return iterations


def test_a_loop_that_was_busy_takes_all_answers_in_a_few_iterations() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as service:
        assert service.submit(iterations_of_a_busy_service).result() < _CALLS // 4
