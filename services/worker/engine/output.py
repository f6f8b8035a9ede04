"""What an engine answers: the tokens of one request, step by step, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Finish(Enum):
    """Why a request ended."""

    STOP = "stop"  # one of the stop tokens; it is the last token
    LENGTH = "length"
    EMBEDDED = "embedded"  # the embedding is the answer
    FAILED = "failed"  # its grammar could not be followed


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, natural log, of the distribution before sampling filters."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefill:
    """What is known once the prompt is computed. Times are of `time.monotonic`."""

    queued_at: float
    admitted_at: float
    cached_tokens: int = 0  # of the prompt, found in the prefix cache
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of positions 1 .. n_prompt - 1, if asked for


class Output(NamedTuple):
    """What one step made of one request. A NamedTuple because there is one for each token."""

    first_index: int  # of token_ids[0] among the generated tokens, those of earlier attempts included
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    prefill: Prefill | None = None  # with the first output
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if asked for
    embedding: tuple[float, ...] = ()
    failure: str = ""  # of a request that failed
