"""Requests of mixed lengths that arrive by chance: the same trace for an installation and for the planner's replay."""

from __future__ import annotations

import asyncio
import gc
import random
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from bench.serve import complete
from services.common.request_log import LOG_BLOCK_TOKENS
from services.planner.trace import TraceRequest

_IDS = (300, 4096)  # ordinary tokens of every vocabulary
_PREFIXES = 4  # system prompts
_PREFIX_TOKENS = 128


@dataclass(frozen=True, slots=True)
class RequestKind:
    """A part of the mixture. Tokens are drawn from ranges, both ends included."""

    share: float
    prompt: tuple[int, int]
    answer: tuple[int, int]
    prefixed: bool = False  # the prompt follows one of the system prompts


MIXTURE = (
    RequestKind(0.60, (16, 128), (32, 128)),  # chats
    RequestKind(0.25, (32, 160), (32, 96), prefixed=True),
    RequestKind(0.15, (384, 768), (16, 48)),  # documents
)


@dataclass(frozen=True, slots=True)
class MixedRequest:
    """A request of the trace."""

    at: float  # arrival, seconds after the trace's begin
    prompt: tuple[int, ...]
    answer_tokens: int

    def to_replay(self) -> TraceRequest:
        """The same request as the planner reads it, with a hash for each of its prefixes."""
        size = LOG_BLOCK_TOKENS
        ends = range(size, len(self.prompt) + 1, size)
        blocks = tuple(_hash(self.prompt[:end]) for end in ends)
        return TraceRequest(self.at, len(self.prompt), self.answer_tokens, blocks)


def _hash(tokens: Sequence[int]) -> int:
    return int.from_bytes(blake2b(array("I", tokens).tobytes(), digest_size=8).digest(), "little")


def draw_trace(rate: float, seconds: float, seed: int) -> list[MixedRequest]:
    """Requests of the mixture that arrive for a time, `rate` a second on average; at least one."""
    rng = random.Random(seed)

    def tokens(n: int) -> tuple[int, ...]:
        return tuple(rng.randrange(*_IDS) for _ in range(n))

    prefixes = [tokens(_PREFIX_TOKENS) for _ in range(_PREFIXES)]
    trace: list[MixedRequest] = []
    at = 0.0
    while not trace or at < seconds:
        (kind,) = rng.choices(MIXTURE, [each.share for each in MIXTURE])
        prefix = rng.choice(prefixes) if kind.prefixed else ()
        trace.append(MixedRequest(at, (*prefix, *tokens(rng.randint(*kind.prompt))), rng.randint(*kind.answer)))
        at += rng.expovariate(rate)
    return trace


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """How a request was served."""

    at: float  # arrival, seconds after the trace's begin
    first_token_s: float
    pace_s: float  # seconds from token to token
    tokens: int  # length of the answer
    late_s: float = 0.0  # between its arrival and its sending: the generator's own delay

    @property
    def seconds(self) -> float:
        """From the arrival to the last token."""
        return self.first_token_s + self.pace_s * (self.tokens - 1)


async def send(url: str, model: str, trace: Sequence[MixedRequest]) -> list[ServedRequest]:
    """Send each request at its time, whatever the answers do. Raises RuntimeError for an answer that is not whole."""
    gc.collect()
    gc.freeze()  # otherwise a garbage collection here would count as a pause of the server
    began, tasks = time.perf_counter(), []
    for request in trace:
        await asyncio.sleep(max(0.0, began + request.at - time.perf_counter()))
        sending = complete(url, model, list(request.prompt), request.answer_tokens, {"return_token_ids": True})
        tasks.append(asyncio.create_task(sending))
    served = []
    for request, answer in zip(trace, await asyncio.gather(*tasks), strict=True):
        times, n_tokens = answer.token_times, request.answer_tokens
        if answer.error or len(times) != n_tokens:
            raise RuntimeError(f"{url}: {len(times)} of {n_tokens} tokens: {answer.error or 'the stream ended'}")
        pace_s = (times[-1] - times[0]) / (n_tokens - 1)
        served.append(ServedRequest(request.at, times[0], pace_s, n_tokens, answer.began - began - request.at))
    return served
