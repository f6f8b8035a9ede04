"""An engine without ranks, scheduler or KV: one token of each request a step, each a function of the tokens before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import wire_chain
from services.compute.ranks.memory import MemoryAccount
from services.compute.token_logprobs import TokenLogprobs
from services.worker.engine.base import Engine, OutputSink, StepReport
from services.worker.engine.errors import (
    BlocksUnavailableError,
    InvalidRequestError,
    NotServingError,
    TooLongError,
    Unavailable,
    UnsupportedError,
)
from services.worker.engine.output import Finish, Output, Prefill, Progress
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import (
    AdapterFacts,
    EngineFacts,
    EngineModel,
    EngineState,
)

MODEL = EngineModel(
    architecture="FakeForCausalLM",
    dtype="float32",
    device="cpu",
    tensor_parallel=1,
    hash_root="fake",
    tokenizer_json=b"{}",
    chat_template="",
    special_tokens={},
    add_bos_token=False,
    eos_token_ids=(1,),
    sampling_defaults={},
)
FACTS = EngineFacts(97, 8, 256, {"load": 0.5}, MemoryAccount(weights=1, workspace=2, kv=3))
STEP_S = 0.001


@dataclass(eq=False)
class _Live:
    request: EngineRequest
    sink: OutputSink
    tokens: list[int]  # generated, those of earlier attempts included
    queued_at: float
    begun: bool = True

    def hand_off(self, handoff: pb.Handoff) -> None:
        self.sink.hand_off(self.request, handoff)
        self.sink.flush(0)


class NoObserver:
    def on_step(self, report: StepReport) -> None: ...

    def on_adapter_load(self, source: str, result: str, seconds: float) -> None: ...

    def on_first_output(self, queue_s: float, total_s: float) -> None: ...

    def on_started(self, facts: EngineFacts) -> None: ...

    def on_lost(self, cause: str, rank: int | None) -> None: ...

    def on_woken(self, seconds: float) -> None: ...

    def on_drain(self) -> None: ...


class FakeEngine(Engine):
    def __init__(self, step_s: float = STEP_S) -> None:
        super().__init__(MODEL, NoObserver(), "loading")
        self.step_s = step_s
        self._n_steps = 0
        self._cached: dict[int, None] = {}
        self._live: dict[EngineRequest, _Live] = {}

    async def run(self) -> None:
        self.facts = FACTS
        while True:
            self._enter_serving()
            stepping = asyncio.create_task(self._steps())
            try:
                await self._until_woken()
            finally:
                stepping.cancel()

    async def _steps(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            self._n_steps += 1
            self._step(self._n_steps)

    def state(self) -> EngineState:
        return EngineState(
            self.phase,
            self.detail,
            running=len(self._live),
            kv_blocks_total=64,
            max_request_tokens=FACTS.max_request_tokens,
            computed_tokens=self.counters.prefill_tokens + self.counters.generated_tokens,
            wake_ms=self.wake_ms,
        )

    def cached_hashes(self) -> list[int]:
        return list(self._cached)

    def submit(self, request: EngineRequest, sink: OutputSink) -> None:
        if self.refusal() is not None:
            raise NotServingError(self.detail)
        if request.sampling.grammar:
            raise InvalidRequestError("sampling.grammar", "this engine follows no grammar")
        if len(request.prompt_ids) + len(request.generated_ids) >= FACTS.max_request_tokens:
            raise TooLongError("prompt_ids", f"at most {FACTS.max_request_tokens - 1} tokens fit")
        self._live[request] = _Live(request, sink, list(request.generated_ids), time.monotonic())
        self.counters.prefill_tokens += len(request.prompt_ids)

    def progress(self, request: EngineRequest) -> Progress:
        return Progress(len(request.prompt_ids), self._n_steps)

    def pin_adapters(self, refs: Sequence[AdapterRef]) -> None:
        """There is no room for any."""

    async def inspect_adapter(self, source: str) -> AdapterFacts:
        raise UnsupportedError("no adapters here")

    async def read_blocks(self, request: pb.PullBlocksRequest) -> AsyncGenerator[pb.KvBlock, None]:
        raise BlocksUnavailableError(Unavailable.MISMATCH, "a fake engine has no KV")
        yield pb.KvBlock()

    async def _give_back(self, level: int) -> None:
        self._cached.clear()
        self.kv_events.cleared()
        self.changes.announce()

    def _why_awake(self) -> str:
        return ""

    def _check_room(self) -> None: ...

    @property
    def _n_waiting(self) -> int:
        return 0

    def _forget(self, request: EngineRequest) -> _Live:
        return self._live.pop(request)

    def _step(self, number: int) -> None:
        sinks = set()
        for request, live in list(self._live.items()):
            live.sink.add(request, self._draw(request, live))
            sinks.add(live.sink)
        for sink in sinks:
            sink.flush(number)
        self.kv_events.flush()
        self.changes.announce()

    def _draw(self, request: EngineRequest, live: _Live) -> Output:
        first = len(live.tokens) == len(request.generated_ids)
        prefill = Prefill(live.queued_at, live.queued_at) if first else None
        if request.embed:
            embedding = (float(request.prompt_ids[0]),)
            return self._end(request, Output(0, (), Finish.EMBEDDED, prefill, embedding=embedding))
        known = [*request.prompt_ids, *live.tokens]
        self._store(wire_chain(MODEL.hash_root, request.cache_salt, known))
        index, token = len(live.tokens), hash((*known, request.sampling.seed)) % FACTS.vocab_size
        live.tokens.append(token)
        self.counters.generated_tokens += 1
        full = len(request.prompt_ids) + len(live.tokens) >= FACTS.max_request_tokens
        finish = Finish.LENGTH if full or len(live.tokens) == request.sampling.max_tokens else None
        if token in request.sampling.stop_token_ids:
            finish = Finish.STOP
        logprobs = ()
        if request.sampling.HasField("logprobs"):
            top = tuple((token + i) % FACTS.vocab_size for i in range(request.sampling.logprobs))
            logprobs = (TokenLogprobs(token, -0.5, 1, top, tuple(-0.5 - i for i in range(len(top)))),)
        output = Output(index, (token,), finish, prefill, logprobs)
        return self._end(request, output) if finish else output

    def _end(self, request: EngineRequest, output: Output) -> Output:
        del self._live[request]
        return output

    def _store(self, hashes: list[int]) -> None:
        fresh = [value for value in hashes if value not in self._cached]
        self._cached.update(dict.fromkeys(fresh))
        self.kv_events.stored(fresh)
