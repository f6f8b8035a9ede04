"""Outputs of an engine: a request's tokens, step by step, and its finish reason."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from services.compute.token_logprobs import TokenLogprobs

MODEL = "model"
_NOT_FINITE = "the model computes infinite numbers or NaN for this text"


class Finish(Enum):
    """Why a request ended."""

    STOP = "stop"  # the last token is a stop token
    LENGTH = "length"
    EMBEDDED = "embedded"  # the output is an embedding
    FAILED = "failed"  # its grammar, or another field, cannot be followed any further


@dataclass(frozen=True, slots=True)
class Prefill:
    """Facts about the prompt, known once it is computed. Times are from `time.monotonic`."""

    queued_at: float
    admitted_at: float
    cached_tokens: int = 0  # prompt tokens found in the prefix cache
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # positions 1 .. n_prompt - 1, if requested


class Progress(NamedTuple):
    """How far a request is: it stands still as long as both numbers do."""

    computed_tokens: int  # known tokens whose KV is here; 0: none, or the engine does not know
    signs: int  # changes with every sign of work on the request, or on what it waits for


class Output(NamedTuple):
    """A step's output of one request. A NamedTuple, for speed: there is one per token."""

    first_index: int  # index of token_ids[0] among the generated tokens, earlier attempts included
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    prefill: Prefill | None = None  # only in the first output
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token, if requested
    embedding: tuple[float, ...] = ()
    failure: str = ""  # message of a failed request
    failed_field: str = "grammar"  # field of the request that cannot be followed any further; MODEL: numbers overflowed
    proposed: int = 0  # drafted tokens that the step verified; all tokens but the last one are accepted ones
    accepted_prediction: int = 0  # tokens of the request's prediction that were drafted in this step and drawn
    rejected_prediction: int = 0  # and those that were drafted and not drawn


def checked(output: Output) -> Output:
    """Return the output, or an empty one of a failed request if its embedding or a log-probability is not finite."""
    if not (output.logprobs or output.embedding or output.prefill):
        return output  # one for each token of most texts
    rows = (*output.logprobs, *(output.prefill.prompt_logprobs if output.prefill else ()))
    if math.isfinite(sum(output.embedding)) and not math.isnan(sum(row.logprob for row in rows)):
        return output
    return overflowed(output._replace(token_ids=(), prefill=None, logprobs=(), embedding=()))


def overflowed(output: Output) -> Output:
    """Return the output of a request that fails after these tokens, because its numbers are not finite."""
    return output._replace(finish=Finish.FAILED, failure=_NOT_FINITE, failed_field=MODEL)
