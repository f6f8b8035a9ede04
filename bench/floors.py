"""What the gateway's protocols cost with nothing behind them: uvicorn's and grpc.aio's own floors.

    python -m bench.floors [--seconds 3]

Every server answers at once with 300 bytes (what a 64-token answer weighs), alone on core 0; clients are on the other
cores. CPU is that of the server process, by which it would be limited if its clients were faster.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
import psutil
import uvicorn
import uvloop

from bench.gateway_clients import HttpTarget
from bench.stats import percentile
from services.common.rpc import bind, new_server, open_channel

ANSWER = b'"choices" "length" ' + b"x" * 281  # the marks that the HTTP client looks for
UNARY, ONE_OF_STREAM, SHARED = "unary", "stream of one message", "one stream for all"
METHODS = {UNARY: "/floor/unary", ONE_OF_STREAM: "/floor/one", SHARED: "/floor/shared"}


class _Floor(grpc.GenericRpcHandler):
    """An empty service without serialization: requests and answers are bytes."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def unary(request: bytes, context: object) -> bytes:
            return ANSWER

        async def one(request: bytes, context: object) -> AsyncIterator[bytes]:
            yield ANSWER

        async def shared(requests: AsyncIterator[bytes], context: object) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request[:4] + ANSWER

        handlers = {
            METHODS[UNARY]: grpc.unary_unary_rpc_method_handler(unary),
            METHODS[ONE_OF_STREAM]: grpc.unary_stream_rpc_method_handler(one),
            METHODS[SHARED]: grpc.stream_stream_rpc_method_handler(shared),
        }
        return handlers.get(handler_call_details.method)


async def _app(scope: Any, receive: Any, send: Any) -> None:
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": ANSWER})


async def serve() -> None:
    """Both servers in one process, one at work at a time; prints the ports."""
    server = new_server()
    server.add_generic_rpc_handlers((_Floor(),))
    grpc_port = bind(server, "127.0.0.1", 0)
    await server.start()
    config = uvicorn.Config(_app, port=0, http="httptools", lifespan="off", log_config=None, access_log=False)
    http = uvicorn.Server(config)
    serving = asyncio.create_task(http.serve())
    while not http.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    print(json.dumps({"grpc": grpc_port, "http": http.servers[0].sockets[0].getsockname()[1]}), flush=True)
    await serving


Ask = Callable[[], Awaitable[object]]


@contextlib.asynccontextmanager
async def _shared_stream(channel: grpc.aio.Channel) -> AsyncIterator[Ask]:
    """Requests numbered on one bidirectional call."""
    call: Any = channel.stream_stream(METHODS[SHARED])()
    waiting: dict[bytes, asyncio.Future[None]] = {}
    numbers, writing = itertools.count(), asyncio.Lock()

    async def read() -> None:
        async for answer in call:
            waiting.pop(answer[:4]).set_result(None)

    async def ask() -> None:
        number = next(numbers).to_bytes(4, "little")
        waiting[number] = asyncio.get_running_loop().create_future()
        done = waiting[number]
        async with writing:
            await call.write(number + bytes(200))
        await done

    reader = asyncio.create_task(read())
    try:
        yield ask
    finally:
        reader.cancel()
        call.cancel()


@contextlib.asynccontextmanager
async def asks(ports: dict[str, int]) -> AsyncIterator[dict[str, Ask]]:
    """One request of every kind."""
    http = HttpTarget("uvicorn", ports["http"])
    async with open_channel(f"127.0.0.1:{ports['grpc']}") as channel:
        unary, one = channel.unary_unary(METHODS[UNARY]), channel.unary_stream(METHODS[ONE_OF_STREAM])

        async def ask_one() -> None:
            async for _ in one(bytes(200)):
                pass

        async def ask_unary() -> None:
            await unary(bytes(200))

        async def ask_http() -> None:
            await http.ask(0, stream=False)

        async with _shared_stream(channel) as ask_shared:
            yield {
                "uvicorn, HTTP/1.1": ask_http,
                f"grpc.aio, {UNARY}": ask_unary,
                f"grpc.aio, {ONE_OF_STREAM}": ask_one,
                f"grpc.aio, {SHARED}": ask_shared,
            }
    await http.close()


async def loop(ask: Ask, clients: int, seconds: float) -> list[float]:
    """Latencies in ms of that many clients, each waiting for its answer before it asks again."""
    latencies: list[float] = []
    end = time.perf_counter() + seconds

    async def client() -> None:
        while (asked := time.perf_counter()) < end:
            await ask()
            latencies.append((time.perf_counter() - asked) * 1000)

    await asyncio.gather(*(client() for _ in range(clients)))
    return latencies


async def measure(seconds: float) -> dict[str, dict[str, float]]:
    """Every kind, alone and 32 at a time."""
    every = os.sched_getaffinity(0)
    core = {min(every)}
    rows: dict[str, dict[str, float]] = {}
    command = [sys.executable, "-m", "bench.floors", "--serve"]
    with subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.PIPE, preexec_fn=lambda: os.sched_setaffinity(0, core)
    ) as server:
        os.sched_setaffinity(0, every - core or every)
        assert server.stdout is not None
        ports, process = json.loads(server.stdout.readline()), psutil.Process(server.pid)
        async with asks(ports) as kinds:
            for name, ask in kinds.items():
                await loop(ask, 32, 0.5)
                alone = await loop(ask, 1, seconds)
                before = sum(process.cpu_times()[:2])
                busy = await loop(ask, 32, seconds)
                cpu_s = sum(process.cpu_times()[:2]) - before
                rows[name] = {
                    "alone_p50_ms": percentile(alone, 50),
                    "busy_p50_ms": percentile(busy, 50),
                    "per_s": len(busy) / seconds,
                    "cpu_us": cpu_s / len(busy) * 1e6,
                }
        server.kill()
    return rows


def main() -> None:
    """Print a table and one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve())
        return
    rows = uvloop.run(measure(options.seconds))
    print("| empty server | C=1 p50 ms | C=32 p50 ms | requests/s | server CPU, us |\n|---|---|---|---|---|")
    for name, row in rows.items():
        print(
            f"| {name} | {row['alone_p50_ms']:.2f} | {row['busy_p50_ms']:.1f} | {row['per_s']:,.0f} "
            f"| {row['cpu_us']:.0f} |"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
