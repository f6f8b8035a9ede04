"""One request while vLLM computes it: turns vLLM's outputs into the engine's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ryzanstein.v1 import worker_pb2 as pb

from services.compute.token_logprobs import TokenLogprobs
from services.worker.engine.base import OutputSink
from services.worker.engine.output import Finish, Output, Prefill, checked
from services.worker.engine.request import EngineRequest
from services.worker.vllm.outputs import finish_of, to_logprobs
from services.worker.vllm.sampling import replays


class ReplayError(Exception):
    """A resumed request cannot go on where it was interrupted."""


def prompt_of(request: EngineRequest) -> list[int]:
    """Return vLLM's prompt; it includes the tokens of earlier attempts, unless vLLM generates them again."""
    return [*request.prompt_ids, *(() if replays(request) else request.generated_ids)]


@dataclass(slots=True, eq=False)
class VllmRequest:
    """A request and where its answer stands."""

    request: EngineRequest
    sink: OutputSink
    stream: AsyncGenerator[Any, None]  # vLLM's outputs
    queued_at: float = field(default_factory=time.monotonic)
    next_index: int = 0  # index of the next token among all generated ones
    replay: tuple[int, ...] = ()  # tokens that vLLM has to generate again before the answer continues
    first: Prefill | None = None  # not delivered yet
    begun: bool = False  # vLLM has sent its first output
    cached_tokens: int = 0  # cached tokens among all known ones
    task: asyncio.Task[None] | None = None  # reads `stream`; None: a suspect that waits

    def __post_init__(self) -> None:
        self.next_index = len(self.request.generated_ids)
        if replays(self.request):
            self.replay = tuple(self.request.generated_ids)

    @property
    def known_tokens(self) -> int:
        """Number of tokens that vLLM gets as the prompt."""
        return len(prompt_of(self.request))

    @property
    def computed_tokens(self) -> int:
        """Known tokens whose KV is there; vLLM says nothing of a prompt before it is complete."""
        return self.known_tokens if self.begun else 0

    @property
    def generated_here(self) -> int:
        """Number of tokens generated in this attempt."""
        return self.next_index - len(self.request.generated_ids)

    def hand_off(self, handoff: pb.Handoff) -> None:
        """Tell its client that another worker has to go on."""
        self.sink.hand_off(self.request, handoff)
        self.sink.flush(0)

    def tokens(self, output: Any) -> Output | None:
        """The engine's output for vLLM's RequestOutput; None if it only repeats tokens of earlier attempts.

        Raises RequestFailedError if the request ends by a fault, ReplayError if vLLM does not repeat them.
        """
        if not self.begun:
            self.first = self._first(output)
        completion, sampling = output.outputs[0], self.request.sampling
        finish = finish_of(completion.finish_reason)
        n_repeated = self._repeated(completion.token_ids)
        ids = tuple(completion.token_ids[n_repeated:])
        if not ids and not finish:
            return None
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampling.HasField("logprobs") and ids:
            logprobs = to_logprobs(ids, completion.logprobs[n_repeated:], sampling.logprobs)
        at, self.next_index = self.next_index, self.next_index + len(ids)
        first, self.first = self.first, None
        return checked(Output(at, ids, finish, first, logprobs))

    def _repeated(self, ids: Sequence[int]) -> int:
        """Number of tokens that repeat those of earlier attempts. Raises ReplayError."""
        n = min(len(self.replay), len(ids))
        if tuple(ids[:n]) != self.replay[:n]:
            at = len(self.request.generated_ids) - len(self.replay)
            raise ReplayError(
                f"vLLM did not repeat the interrupted answer: from token {at} on, another one is as likely"
            )
        self.replay = self.replay[n:]
        return n

    def embedding(self, output: Any) -> Output:
        """The engine's output for vLLM's PoolingRequestOutput."""
        self.begun, self.cached_tokens = True, output.num_cached_tokens or 0
        vector = tuple(output.outputs.data.float().tolist())
        prefill = Prefill(self.queued_at, self.queued_at, self.cached_tokens)
        return checked(Output(0, (), Finish.EMBEDDED, prefill, embedding=vector))

    def _first(self, output: Any) -> Prefill:
        self.begun, self.cached_tokens = True, output.num_cached_tokens or 0
        prompt, rows = self.request.prompt_ids, output.prompt_logprobs or ()
        return Prefill(
            self.queued_at,
            max(output.metrics.scheduled_ts, self.queued_at),
            min(self.cached_tokens, len(prompt)),
            # The first position has no row. Without rows for the others, none were asked for.
            to_logprobs(prompt[1:], rows[1:], self.request.sampling.prompt_logprobs) if rows else (),
        )
