"""A request to an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2 as pb


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that a request runs with. The digest names it; it is never another one under the same name."""

    digest: str  # SHA-256 of its configuration and tensors, hex
    source: str  # a folder that this worker can read
    name: str = ""  # that clients use


@dataclass(frozen=True, slots=True, eq=False)
class EngineRequest:
    """One attempt at a request. Outputs and `cancel` identify the attempt by this object."""

    request_id: str
    prompt_ids: Sequence[int]
    sampling: pb.Sampling  # its `stop_token_ids` are all tokens that end the text, EOS included
    attempt: int = 1
    generated_ids: Sequence[int] = ()  # tokens of earlier attempts; they count as generated
    tenant: str = ""
    weight: int = 1
    priority: int = 0  # lower runs first
    cache_salt: str = ""  # isolates the prefix cache
    second_from: int = 0  # position of the second of two texts; 0: one text
    embed: bool = False  # return the pooled hidden state instead of tokens
    trial_tokens: int = 0  # > 0: a suspect; it runs without another suspect until it generated this many tokens here
    adapter: AdapterRef | None = None
    pull: pb.PullHint | None = None  # another worker holds more of the prompt's KV
    standby: pb.Standby | None = None  # its KV may be copied there
    prediction_ids: Sequence[int] = ()  # tokens of an expected answer, from which drafts are taken
    images: Sequence[pb.Image] = ()  # images of the prompt, in order
