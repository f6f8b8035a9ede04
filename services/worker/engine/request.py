"""What is asked of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One attempt at a request. The object itself names it: outputs come with it, and `cancel` takes it."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: pb.Sampling  # `stop_token_ids` are all that end the text, EOS included
    attempt: int = 1
    generated_ids: Sequence[int] = ()  # accepted from earlier attempts; they count as generated
    tenant: str = ""
    weight: int = 1
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # isolates the prefix cache
    embed: bool = False  # answer with the pooled hidden state instead of tokens
    trial_tokens: int = 0  # workers died under it: runs beside no other suspect until it has generated so many here
    pull: pb.PullHint | None = None  # another worker holds more of the prompt's KV
