"""vLLM's processes without vLLM: its outputs by name, one token a step, each the number of tokens before it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from types import SimpleNamespace

import torch

from services.worker.vllm.core import CoreError, CoreLoss, CoreRequest, CoreStarted, CoreStep, RequestFailedError
from services.worker.vllm.kv_mirror import KvMirror

STARTED = CoreStarted(
    vocab_size=1000,
    hidden_size=8,
    max_model_len=64,
    block_tokens=32,
    n_blocks=16,
    phases={"loading weights": 0.5},
    tasks=frozenset({"generate", "embed", "classify"}),
    sleeps=True,
)
KILLED = CoreLoss("exited", "EngineCore ended by SIGKILL")


class FakeCore:
    def __init__(self, started: CoreStarted = STARTED) -> None:
        self.started = started
        self.on_step: Callable[[CoreStep], None] = lambda _: None
        self.on_phase: Callable[[str], None] = lambda _: None
        self.added: list[CoreRequest] = []
        self.begun: list[str] = []
        self.starts = 0
        self.failures: list[str] = []  # error messages of the next starts
        self.broken = ""  # a request that ends by a fault
        self.signs = 0
        self.adapters: list[str] = []
        self.slept: list[int] = []
        self.wakes = 0
        self.stuck = False  # sleeps and wakes fail
        self._lost = asyncio.Event()
        self._queues: dict[str, asyncio.Queue[SimpleNamespace | None]] = {}

    async def start(self, mirror: KvMirror) -> CoreStarted:
        self.starts += 1
        if self.failures:
            raise CoreError(self.failures.pop(0))
        self._lost.clear()
        self.adapters.clear()
        self.on_phase("loading weights")
        self.mirror = mirror
        return self.started

    def add(self, request: CoreRequest) -> AsyncGenerator[SimpleNamespace, None]:
        self.added.append(request)
        return self._stream(request)

    async def _stream(self, request: CoreRequest) -> AsyncGenerator[SimpleNamespace, None]:
        self.begun.append(request.request_id)
        if request.request_id == self.broken:
            raise RequestFailedError("the request alone")
        queue = self._queues[request.request_id] = asyncio.Queue()
        try:
            while (output := await queue.get()) is not None:
                yield output
                if request.task != "generate" or output.outputs[0].finish_reason:
                    return
            raise CoreError("dead")
        finally:
            del self._queues[request.request_id]

    async def step(self, *, last: bool = False) -> None:
        """A token for every request; `last` ends them. Returns once the outputs are delivered."""
        await asyncio.sleep(0)  # streams of new requests begin
        for request in self.added:
            if (queue := self._queues.get(request.request_id)) is None:
                continue
            if request.task != "generate":
                data = torch.tensor([float(request.second_from), 0.5])
                queue.put_nowait(SimpleNamespace(outputs=SimpleNamespace(data=data), num_cached_tokens=0))
                continue
            completion = SimpleNamespace(token_ids=[7], logprobs=None, finish_reason="length" if last else None)
            queue.put_nowait(
                SimpleNamespace(
                    outputs=[completion],
                    prompt_logprobs=None,
                    num_cached_tokens=len(request.token_ids) // 2,
                    metrics=SimpleNamespace(scheduled_ts=time.monotonic()),
                )
            )
        running = 0 if last else len(self._queues)
        self.signs += 1
        self.on_step(CoreStep(time.monotonic(), running, 0, 0.5, 0))
        await asyncio.sleep(0.001)

    def lose(self, loss: CoreLoss = KILLED) -> None:
        self._loss = loss
        self._lost.set()
        for queue in self._queues.values():
            queue.put_nowait(None)

    async def load_adapter(self, digest: str, folder: str) -> None:
        if digest == self.broken:
            raise RequestFailedError(f"{folder}: no LoRA for this model")
        if digest in self.adapters:
            self.adapters.remove(digest)
        self.adapters.append(digest)

    async def unload_adapter(self, digest: str) -> None:
        self.adapters.remove(digest)

    async def sleep(self, level: int) -> None:
        self.slept.append(level)
        if self.stuck:
            raise CoreError("it does not sleep")

    async def wake(self) -> None:
        self.wakes += 1
        if self.stuck:
            raise CoreError("out of memory")

    def kill(self) -> None:
        self.stuck = False
        self.lose()

    async def wait_lost(self) -> CoreLoss:
        await self._lost.wait()
        return self._loss

    async def stop(self) -> None: ...
