"""Clients with little overhead, since they share the machine with the server under test."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from dataclasses import dataclass, field
from typing import Protocol, cast

from ryzanstein.v1 import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc

from bench.gateway_mocks import ANSWER_TOKENS, MODEL
from services.common.rpc import open_channel

_MESSAGES = [
    {"role": "system", "content": "You are a helpful assistant that writes short Python functions."},
    {"role": "user", "content": "Write a function that returns the mean of a list of numbers."},
]
_PROMPT_IDS = list(range(100, 140))


class BadAnswerError(RuntimeError):
    """An answer differs from the mock's answer."""


class Target(Protocol):
    """A server under test, which answers with 64 tokens."""

    name: str

    async def ask(self, pace_us: int, *, stream: bool) -> list[float]:
        """Send one request; return the arrival times of its parts (`time.perf_counter()`).

        Raises BadAnswerError or OSError.
        """
        ...

    async def close(self) -> None:
        """Close every connection."""
        ...


class _Answer(asyncio.Protocol):
    """One HTTP/1.1 connection, one answer at a time."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.arrivals: list[float] = []
        self.done: asyncio.Future[None] | None = None
        self.lost = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it

    def data_received(self, data: bytes) -> None:
        self.arrivals.append(time.perf_counter())
        self.data += data
        if self.done is not None and not self.done.done() and self._complete():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if self.done is not None and not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("closed in mid-answer"))

    def _complete(self) -> bool:
        if self.data.endswith(b"\r\n0\r\n\r\n"):
            return True
        end = self.data.find(b"\r\n\r\n")
        at = self.data[: max(0, end)].lower().find(b"content-length:")
        return at >= 0 and len(self.data) - end - 4 >= int(self.data[at + 15 :].split(b"\r\n", 1)[0])


@dataclass
class HttpTarget:
    """POST /v1/chat/completions over kept-alive connections, read as bytes."""

    name: str
    port: int
    answers: list[bytes] | None = None  # if a list, it collects the raw bytes of every answer
    _idle: list[_Answer] = field(default_factory=list)

    async def ask(self, pace_us: int, *, stream: bool) -> list[float]:
        """See :class:`Target`."""
        connection = await self._connection()
        done = connection.done = asyncio.get_running_loop().create_future()
        body = {
            "model": MODEL, "messages": _MESSAGES, "max_tokens": ANSWER_TOKENS, "seed": pace_us, "stream": stream,
        }  # fmt: skip
        data = json.dumps(body).encode()
        connection.transport.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Authorization: Bearer unused\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)
        )
        await done
        answer, arrivals = bytes(connection.data), connection.arrivals
        connection.data, connection.arrivals = bytearray(), []
        self._idle.append(connection)
        marks = (b" 200 ", b'"length"', b"data: [DONE]" if stream else b'"choices"')
        if not all(mark in answer for mark in marks):
            raise BadAnswerError(f"{self.name}: {answer[:400]!r}")
        if self.answers is not None:
            self.answers.append(answer)
        return arrivals

    async def _connection(self) -> _Answer:
        while self._idle:
            connection = self._idle.pop()
            if not connection.lost:
                return connection
        _, connection = await asyncio.get_running_loop().create_connection(_Answer, "127.0.0.1", self.port)
        return connection

    async def close(self) -> None:
        """See :class:`Target`."""
        for connection in self._idle:
            connection.transport.close()


def streamed_text(answer: bytes) -> str:
    """The text of a streamed chat completion."""
    events = [json.loads(line[6:]) for line in answer.split(b"\n") if line.startswith(b"data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])


class ConnectTarget:
    """The worker's gRPC without a gateway: one Connect stream for all requests, as gateways use."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._channel = open_channel(address)
        self._call = worker_pb2_grpc.WorkerStub(self._channel).Connect()
        self._numbers = itertools.count()
        self._arrivals: dict[str, list[float]] = {}
        self._done: dict[str, asyncio.Future[None]] = {}
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    async def ask(self, pace_us: int, *, stream: bool) -> list[float]:
        """See :class:`Target`."""
        request_id = f"direct-{next(self._numbers)}"
        sampling = worker_pb2.Sampling(seed=pace_us, max_tokens=ANSWER_TOKENS)
        submit = worker_pb2.Submit(request_id=request_id, attempt=1, prompt_ids=_PROMPT_IDS, sampling=sampling)
        arrivals = self._arrivals[request_id] = []
        done = self._done[request_id] = asyncio.get_running_loop().create_future()
        async with self._writing:
            await self._call.write(worker_pb2.ConnectFrames(frames=[worker_pb2.ConnectFrame(submit=submit)]))
        await done
        del self._arrivals[request_id], self._done[request_id]
        return arrivals

    async def _read(self) -> None:
        async for step in self._call:
            now = time.perf_counter()
            for output in step.outputs:
                self._arrivals[output.request_id].append(now)
                if output.HasField("finish"):
                    self._done[output.request_id].set_result(None)

    async def close(self) -> None:
        """See :class:`Target`."""
        self._reader.cancel()
        self._call.cancel()
        await self._channel.close()


class GrpcTarget:
    """The gateway's public gRPC service."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self._channel = open_channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def ask(self, pace_us: int, *, stream: bool) -> list[float]:
        """See :class:`Target`."""
        request = inference_pb2.ChatRequest(
            model=MODEL,
            messages=[inference_pb2.ChatMessage(**message) for message in _MESSAGES],
            options=inference_pb2.GenerationOptions(max_tokens=ANSWER_TOKENS, seed=pace_us),
        )
        arrivals, n_tokens, finish = [], 0, ""
        async for response in self._stub.Chat(request):
            arrivals.append(time.perf_counter())
            n_tokens += len(response.ids)
            finish = response.finish_reason
        if n_tokens != ANSWER_TOKENS or finish != "length":
            raise BadAnswerError(f"{self.name}: {n_tokens} tokens, finish {finish!r}")
        return arrivals

    async def close(self) -> None:
        """See :class:`Target`."""
        await self._channel.close()


@dataclass
class Relay:
    """Forwards TCP connections and counts the bytes."""

    upstream: int
    up: int = 0
    down: int = 0
    port: int = 0

    async def start(self) -> asyncio.Server:
        """Listen on a free port."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.upstream)
        await asyncio.gather(self._pass(reader, far_writer, "up"), self._pass(far_reader, writer, "down"))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        while data := await reader.read(1 << 16):
            setattr(self, way, getattr(self, way) + len(data))
            writer.write(data)
        writer.close()


async def bytes_per_request(target: Target, relay: Relay, *, pace_us: int, stream: bool) -> tuple[float, float]:
    """Bytes up and down per request on an open connection."""
    await target.ask(pace_us, stream=stream)
    await asyncio.sleep(0.05)
    requests, up, down = 20, relay.up, relay.down
    for _ in range(requests):
        await target.ask(pace_us, stream=stream)
    await asyncio.sleep(0.05)  # the last bytes may be counted after the answer is complete
    return (relay.up - up) / requests, (relay.down - down) / requests
