"""A peer that stands still is found by its connection, without any word from Redis or a router."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterable, Iterator

import grpc.aio
import pytest
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.common.rpc import open_channel

SERVER = """
import asyncio
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc
from services.common.rpc import bind, new_server

class SilentWorker(worker_pb2_grpc.WorkerServicer):
    async def WatchState(self, request, context):
        while True:
            yield worker_pb2.WorkerState()
            await asyncio.sleep(0.05)

async def main():
    server = new_server()
    worker_pb2_grpc.add_WorkerServicer_to_server(SilentWorker(), server)
    print(bind(server, "127.0.0.1", 0), flush=True)
    await server.start()
    await server.wait_for_termination()

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[tuple[int, str]]:
    """Process id and address of a server in a process of its own."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, f"127.0.0.1:{process.stdout.readline().strip()}"
    process.kill()
    process.wait()


async def read_to_the_end(states: AsyncIterable[object]) -> None:
    async with asyncio.timeout(30):
        async for _ in states:
            pass


async def test_a_stopped_process_breaks_its_streams(server: tuple[int, str]) -> None:
    """gRPC's own default is a minute, so half of that tells the two apart."""
    pid, address = server
    async with open_channel(address) as channel:
        states = worker_pb2_grpc.WorkerStub(channel).WatchState(worker_pb2.WatchStateRequest())
        await anext(aiter(states))
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(grpc.aio.AioRpcError) as broken:
            await read_to_the_end(states)
        assert broken.value.code() is grpc.StatusCode.UNAVAILABLE
