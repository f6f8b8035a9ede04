"""Mocks behind a proxy under test: a scripted worker with its router, and an OpenAI-compatible backend.

It runs as its own process, and prints the addresses as one line of JSON. The `seed` of a request sets the pace of its
answer: 0 is all tokens at once, n is one token every n microseconds (1: as fast as possible).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import uvloop
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc
from tokenizers import Tokenizer

from services.common.rpc import bind, new_server
from services.common.tls.credentials import Tls
from tests.integration.gateway.placing import PlacingRouter

MODEL = "mock"
ANSWER_TOKENS = 64
TOKENIZER_FOLDER = Path(__file__).parents[1] / "models" / "ryzanstein-tiny"
_TEXT = "def mean(values):\n    total = sum(values)\n    return total / len(values)\n" * 4
_UNPACED_S = 1e-5  # up to this pause, only yield to the event loop


def answer_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens of every answer."""
    return tokenizer.encode(_TEXT, add_special_tokens=False).ids[:ANSWER_TOKENS]


def answer_text() -> str:
    """The text of every answer."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))
    return tokenizer.decode(answer_ids(tokenizer))


def model_card(worker_id: str, incarnation: str) -> worker_pb2.ModelCard:
    """A card with the bundled model's tokenizer and template, so that the gateway's text processing is measured."""
    config = json.loads((TOKENIZER_FOLDER / "tokenizer_config.json").read_text())
    tokenizer = (TOKENIZER_FOLDER / "tokenizer.json").read_bytes()
    return worker_pb2.ModelCard(
        model=MODEL,
        worker_id=worker_id,
        incarnation=incarnation,
        max_model_len=2048,
        vocab_size=Tokenizer.from_buffer(tokenizer).get_vocab_size(),
        tokenizer_json=tokenizer,
        chat_template=config["chat_template"],
        special_tokens={"bos_token": config["bos_token"], "eos_token": config["eos_token"]},
        hash_root="mock-root",
        hidden_size=4,
        created=1_700_000_000,
    )


@dataclass(slots=True)
class _Running:
    submit: worker_pb2.Submit
    ids: list[int]
    sent: int = 0


class MockWorker(worker_pb2_grpc.WorkerServicer):
    """Steps like an engine: one message has the next token of every running request."""

    loading = False

    def __init__(self, worker_id: str) -> None:
        self.worker_id, self.model, self.incarnation = worker_id, MODEL, uuid.uuid4().hex
        self.address = ""
        self._card = model_card(worker_id, self.incarnation)
        self._ids = answer_ids(Tokenizer.from_buffer(self._card.tokenizer_json))

    async def GetModelCard(  # noqa: N802
        self, request: worker_pb2.GetModelCardRequest, context: Any
    ) -> worker_pb2.ModelCard:
        """See the contract."""
        return self._card

    async def Connect(  # noqa: N802
        self, request_iterator: AsyncIterator[worker_pb2.ConnectFrames], context: Any
    ) -> AsyncIterator[worker_pb2.StepOutputs]:
        """See the contract."""
        running: dict[str, _Running] = {}
        some = asyncio.Event()
        reader = asyncio.create_task(_read(request_iterator, running, some, self._ids))
        step = 0
        try:
            while True:
                await some.wait()
                step += 1
                pace_s = min(state.submit.sampling.seed for state in running.values()) / 1e6
                yield worker_pb2.StepOutputs(step=step, outputs=[self._next(state) for state in running.values()])
                for request_id in [key for key, state in running.items() if state.sent == len(state.ids)]:
                    running.pop(request_id, None)
                if not running:
                    some.clear()
                await asyncio.sleep(pace_s if pace_s > _UNPACED_S else 0)
        finally:
            reader.cancel()

    def _next(self, state: _Running) -> worker_pb2.Output:
        first, submit = state.sent, state.submit
        state.sent = first + 1 if submit.sampling.seed else len(state.ids)
        output = worker_pb2.Output(
            request_id=submit.request_id,
            attempt=submit.attempt,
            first_index=first,
            ids=state.ids[first : state.sent],
        )
        if state.sent == len(state.ids):
            output.finish = worker_pb2.FINISH_REASON_LENGTH
        return output


async def _read(
    messages: AsyncIterator[worker_pb2.ConnectFrames],
    running: dict[str, _Running],
    some: asyncio.Event,
    ids: list[int],
) -> None:
    async for frame in (frame async for message in messages for frame in message.frames):
        if frame.HasField("submit"):
            answer = ids[: frame.submit.sampling.max_tokens or len(ids)]
            running[frame.submit.request_id] = _Running(frame.submit, answer)
            some.set()
        elif frame.HasField("cancel"):
            running.pop(frame.cancel.request_id, None)
            if not running:
                some.clear()


class MockBackend(asyncio.Protocol):
    """The minimal OpenAI server that proxies accept; HTTP/1.1 with keep-alive."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts
        self._data = b""
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._data += data
        head, separator, body = self._data.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
        )
        if not separator or len(body) < length:
            return
        self._data = body[length:]
        if head.startswith(b"GET"):
            self._send_json({"status": "ok", "data": [{"id": MODEL, "object": "model"}]})
            return
        question = json.loads(body[:length])
        if question.get("stream"):
            self._answering = asyncio.create_task(self._stream((question.get("seed") or 0) / 1e6))
        else:
            self._send_json(self._whole())

    def _send_json(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
        self._transport.write(head + data)

    def _whole(self) -> dict[str, Any]:
        message = {"role": "assistant", "content": "".join(self._texts)}
        n = len(self._texts)
        return {
            "id": "chatcmpl-mock", "object": "chat.completion", "created": 1, "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 40, "completion_tokens": n, "total_tokens": n + 40},
        }  # fmt: skip

    async def _stream(self, pace_s: float) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self._transport.write(head + self._event({"role": "assistant", "content": ""}, None))
        for text in self._texts:
            self._transport.write(self._event({"content": text}, None))
            await asyncio.sleep(pace_s if pace_s > _UNPACED_S else 0)
        end = self._event({}, "length") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        self._transport.write(end)

    @staticmethod
    def _event(delta: dict[str, str], finish: str | None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        event = {
            "id": "chatcmpl-mock", "object": "chat.completion.chunk", "created": 1, "model": MODEL,
            "choices": [choice],
        }  # fmt: skip
        return _chunk(b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


async def serve(certificates: Path | None) -> None:
    """Serve until killed; worker and router under mutual TLS with the folders of these names, if there are some."""
    worker = MockWorker("worker-0")
    of_worker, of_router = (Tls(certificates / name) if certificates else None for name in ("worker", "router"))
    server = new_server(tls=of_worker)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    worker.address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, of_worker)}"
    await server.start()
    router = PlacingRouter([worker])  # type: ignore[list-item]  # it needs only what the mock has
    await router.start(of_router)
    tokenizer = Tokenizer.from_file(str(TOKENIZER_FOLDER / "tokenizer.json"))
    texts = [tokenizer.decode([token]) for token in answer_ids(tokenizer)]
    backend = await asyncio.get_running_loop().create_server(lambda: MockBackend(texts), "127.0.0.1", 0)
    port = backend.sockets[0].getsockname()[1]
    print(json.dumps({"worker": worker.address, "router": router.address, "backend": port}), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--certificates", type=Path)
    uvloop.run(serve(parser.parse_args().certificates))
