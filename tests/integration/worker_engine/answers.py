"""The outputs of a request from an engine under test, with the conditions that tests wait for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ryzanstein.v1 import worker_pb2 as pb

from services.compute.token_logprobs import TokenLogprobs
from services.worker.engine.base import Engine
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.output import Finish, Output
from services.worker.engine.request import EngineRequest

PROMPT = list(range(5, 45))
LENGTH = 24
NEAR_TIE = 1e-3
WITHIN_S = 300  # a busy machine is slow


@dataclass(eq=False)
class Answer:
    """Implements OutputSink for one request."""

    outputs: list[Output] = field(default_factory=list)
    handoff: pb.Handoff | None = None
    refusal: InvalidRequestError | None = None
    flushed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def ids(self) -> list[int]:
        return [token for output in self.outputs for token in output.token_ids]

    @property
    def finish(self) -> Finish | None:
        return self.outputs[-1].finish if self.outputs else None

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [row for output in self.outputs for row in output.logprobs]

    def add(self, request: EngineRequest, output: Output) -> None:
        assert self.finish is None, "output after the end"
        assert self.handoff is None, "output after a handoff"
        self.outputs.append(output)

    def refuse(self, request: EngineRequest, error: InvalidRequestError) -> None:
        self.refusal = error

    def announce_trial(self, request: EngineRequest) -> None:
        raise AssertionError("no request is a suspect")

    def hand_off(self, request: EngineRequest, handoff: pb.Handoff) -> None:
        self.handoff = handoff

    def flush(self, step: int) -> None:
        self.flushed.set()

    async def until(self, n_tokens: int) -> None:
        async with asyncio.timeout(WITHIN_S):
            while len(self.ids) < n_tokens and self.finish is None and self.handoff is None and self.refusal is None:
                self.flushed.clear()
                await self.flushed.wait()


def ask(prompt: list[int] = PROMPT, n: int = LENGTH, *, generated: tuple[int, ...] = (), **sampling: object):
    chosen = pb.Sampling(max_tokens=n, **sampling)
    return EngineRequest("r", prompt, chosen, generated_ids=generated)


def submitted(engine: Engine, request: EngineRequest) -> Answer:
    answer = Answer()
    engine.submit(request, answer)
    return answer


async def complete(engine: Engine, request: EngineRequest) -> Answer:
    answer = submitted(engine, request)
    await answer.until(10**9)
    return answer


def check_same(engine: Engine, whole: Answer, ids: list[int], begin: int = 0) -> None:
    """Check that `ids` are those of `whole` from `begin` on; an approximate engine may differ from a near tie on."""
    if ids == whole.ids[begin:]:
        return
    assert engine.model.resume == "approximate"
    at = next(at for at, (one, other) in enumerate(zip(whole.ids[begin:], ids, strict=True), begin) if one != other)
    likeliest, second = whole.logprobs[at].top_logprobs
    assert likeliest - second < NEAR_TIE, f"token {at} differs"


async def idle(engine: Engine) -> None:
    async with asyncio.timeout(WITHIN_S):
        with engine.changes.watch() as changed:
            while engine.state().running or engine.state().waiting:
                await changed.wait()
                changed.clear()


async def serves(engine: Engine) -> None:
    async with asyncio.timeout(WITHIN_S):
        with engine.changes.watch() as changed:
            while engine.phase != pb.PHASE_SERVING:
                await changed.wait()
                changed.clear()


async def cached(engine: Engine, wanted: set[int]) -> None:
    """Return once the engine has announced these blocks."""
    async with asyncio.timeout(WITHIN_S):
        with engine.changes.watch() as changed:
            while not wanted <= set(engine.cached_hashes()):
                await changed.wait()
                changed.clear()
