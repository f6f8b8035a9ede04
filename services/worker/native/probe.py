"""The start-up probe: a request of the worker itself, which measures speeds for routers before the first client."""

from __future__ import annotations

from ryzanstein.v1.worker_pb2 import Sampling

from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler

_PROMPT_TOKENS = 128
_OUTPUT_TOKENS = 8
_LEAST_IMPORTANT = 2**31 - 1  # every other request goes first


def probe_request(scheduler: Scheduler, vocab_size: int, *, embeds: bool = False) -> Request | None:
    """A request that times a prefill and some decodes, among other requests; None if the context is too short.

    `embeds`: the model generates nothing, and only the prefill is timed.
    """
    n_prompt = min(_PROMPT_TOKENS, scheduler.capacity.max_request_tokens - _OUTPUT_TOKENS)
    if n_prompt < 1:
        return None
    return Request(
        token_ids=[i % vocab_size for i in range(n_prompt)],
        n_prompt=n_prompt,
        sampling=Sampling(),
        max_tokens=_OUTPUT_TOKENS,
        priority=_LEAST_IMPORTANT,
        cacheable=False,
        embed=embeds,
    )
