"""The gateway's side of a worker's streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import grpc
from ryzanstein.v1 import worker_pb2 as pb
from ryzanstein.v1 import worker_pb2_grpc

from services.common.rpc import open_channel


async def until(condition: Callable[[], object], seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


@dataclass
class GatewayAnswer:
    request_id: str
    first_index: int = 0
    ids: list[int] = field(default_factory=list)
    outputs: list[pb.Output] = field(default_factory=list)
    end: asyncio.Event = field(default_factory=asyncio.Event)
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def last(self) -> pb.Output:
        return self.outputs[-1]

    def take(self, output: pb.Output) -> None:
        if output.ids:
            if not self.ids:
                self.first_index = output.first_index
            assert output.first_index == self.first_index + len(self.ids)
        assert not self.end.is_set(), "output after the end"
        self.ids += output.ids
        self.outputs.append(output)
        self.grew.set()
        if output.WhichOneof("end"):
            self.end.set()

    async def at_least(self, n: int) -> None:
        while len(self.ids) < n:
            self.grew.clear()
            await asyncio.wait_for(self.grew.wait(), 60)


class FakeGateway:
    """One Connect stream."""

    def __init__(self, address: str, heartbeat_ms: int = 0) -> None:
        self._heartbeat_ms = heartbeat_ms
        self._channel = open_channel(address)
        self.stub = worker_pb2_grpc.WorkerStub(self._channel)
        self.answers: dict[tuple[str, int], GatewayAnswer] = {}
        self.messages = 0
        self.progress: list[pb.Progress] = []
        self._next = 0

    async def __aenter__(self) -> Self:
        await asyncio.wait_for(self._channel.channel_ready(), 60)  # the process may just have been started
        self._stream = self.stub.Connect()
        await self.send(pb.ConnectFrame(hello=pb.Hello(gateway_id="test", heartbeat_ms=self._heartbeat_ms)))
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stream.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)
        await self._channel.close()

    async def submit(self, prompt: Sequence[int], max_tokens: int = 5, **fields: object) -> GatewayAnswer:
        sampling = fields.pop("sampling", pb.Sampling(max_tokens=max_tokens, ignore_eos=True))
        request_id = str(fields.pop("request_id", f"r{self._next}"))
        self._next += 1
        attempt = fields.setdefault("attempt", 1)
        assert isinstance(attempt, int)
        submit = pb.Submit(request_id=request_id, prompt_ids=prompt, sampling=sampling, **fields)
        answer = self.answers[request_id, attempt] = GatewayAnswer(request_id)
        await self.send(pb.ConnectFrame(submit=submit))
        return answer

    async def cancel(self, answer: GatewayAnswer) -> None:
        await self.send(pb.ConnectFrame(cancel=pb.Cancel(request_id=answer.request_id)))

    async def send(self, *frames: pb.ConnectFrame) -> None:
        await self._stream.write(pb.ConnectFrames(frames=frames))

    async def complete(self, prompt: Sequence[int], max_tokens: int = 5, **fields: object) -> GatewayAnswer:
        answer = await self.submit(prompt, max_tokens, **fields)
        await asyncio.wait_for(answer.end.wait(), 60)
        return answer

    async def state(self) -> pb.WorkerState:
        async for state in self.stub.WatchState(pb.WatchStateRequest()):
            return state
        raise AssertionError("no state")

    async def wait_state(self, wanted: Callable[[pb.WorkerState], bool], seconds: float = 60) -> pb.WorkerState:
        async with asyncio.timeout(seconds):
            async for state in self.stub.WatchState(pb.WatchStateRequest()):
                if not state.unchanged and wanted(state):
                    return state
        raise AssertionError("the stream ended")

    async def wait_serving(self, seconds: float = 120) -> None:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    await self.wait_state(lambda state: state.phase == pb.PHASE_SERVING, seconds)
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
                else:
                    return

    async def _read(self) -> None:
        async for message in self._stream:
            self.messages += 1
            self.progress += message.progress
            for output in message.outputs:
                self.answers[output.request_id, output.attempt].take(output)
