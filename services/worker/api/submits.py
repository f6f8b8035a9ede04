"""From a Submit frame to a request: every field is checked here, at the edge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ryzanstein.v1 import worker_pb2 as pb

from services.common.blockhash import chain_root
from services.common.grammar import MAX_GRAMMAR_BYTES
from services.worker.scheduling.request import Request

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MAX_WEIGHT = 1000
MIN_REPETITION_PENALTY = 1e-3  # logits that are divided by less leave float32's range


class InvalidSubmitError(ValueError):
    """A field of a Submit has a value that no worker accepts."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What the checks need to know about the model."""

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    hash_root: str
    generates: bool = True  # False: it only embeds


def to_request(submit: pb.Submit, limits: ModelLimits) -> Request:
    """Build the scheduler's request; raises InvalidSubmitError naming the first bad field."""
    prompt, generated = list(submit.prompt_ids), list(submit.generated_ids)
    if not submit.request_id:
        raise InvalidSubmitError("request_id", "must not be empty")
    if not prompt:
        raise InvalidSubmitError("prompt_ids", "must not be empty")
    _check_ids("prompt_ids", prompt, limits.vocab_size)
    _check_ids("generated_ids", generated, limits.vocab_size)
    if not submit.embed and not limits.generates:
        raise InvalidSubmitError("embed", "this checkpoint has no output head: it embeds and cannot generate")
    if submit.embed and generated:
        raise InvalidSubmitError("generated_ids", "must be empty when embed is set")
    if submit.weight > MAX_WEIGHT:
        raise InvalidSubmitError("weight", f"{submit.weight} is above {MAX_WEIGHT}")
    sampling = _checked(submit.sampling, limits)
    max_tokens = sampling.max_tokens
    if max_tokens and len(generated) >= max_tokens and not submit.embed:
        raise InvalidSubmitError("sampling.max_tokens", f"{len(generated)} tokens are generated already")
    return Request(
        token_ids=prompt + generated,
        n_prompt=len(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        tenant=submit.tenant,
        weight=submit.weight or 1,
        priority=submit.priority,
        chain_root=chain_root(limits.hash_root, submit.cache_salt),
        pool=submit.embed,
        trial_tokens=submit.trial_tokens,
    )


def _checked(sampling: pb.Sampling, limits: ModelLimits) -> pb.Sampling:
    """The message as the ranks read it: with every id that ends the text among its stop ids."""
    _check_ranges(sampling)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, limits.vocab_size)
    _check_ids("sampling.logit_bias", sampling.logit_bias, limits.vocab_size)
    ours = pb.Sampling()  # a part of a message keeps all of it in memory
    ours.CopyFrom(sampling)
    ours.top_k = min(sampling.top_k, limits.vocab_size)
    if sampling.grammar or not sampling.ignore_eos:  # a grammar may leave nothing but the end
        del ours.stop_token_ids[:]
        ours.stop_token_ids.extend(dict.fromkeys((*limits.eos_token_ids, *sampling.stop_token_ids)))
    return ours


def _check_ranges(sampling: pb.Sampling) -> None:
    for field, low, high in (
        ("temperature", 0.0, 100.0),
        ("top_p", 0.0, 1.0),
        ("min_p", 0.0, 1.0),
        ("repetition_penalty", 0.0, 100.0),
        ("presence_penalty", -100.0, 100.0),
        ("frequency_penalty", -100.0, 100.0),
        ("logprobs", 0, MAX_LOGPROBS),
        ("prompt_logprobs", 0, MAX_LOGPROBS),
    ):
        value = getattr(sampling, field)
        if not low <= value <= high:  # also refuses NaN
            raise InvalidSubmitError(f"sampling.{field}", f"{value} is not in [{low}, {high}]")
    if 0 < sampling.repetition_penalty < MIN_REPETITION_PENALTY:
        message = f"{sampling.repetition_penalty} is below {MIN_REPETITION_PENALTY}"
        raise InvalidSubmitError("sampling.repetition_penalty", message)
    if sampling.max_tokens and sampling.min_tokens > sampling.max_tokens:
        message = f"{sampling.min_tokens} is above max_tokens {sampling.max_tokens}"
        raise InvalidSubmitError("sampling.min_tokens", message)
    for field, length, most in (
        ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKENS),
        ("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS),
    ):
        if length > most:
            raise InvalidSubmitError(f"sampling.{field}", f"{length} entries; at most {most} are allowed")
    if len(sampling.grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidSubmitError("sampling.grammar", f"at most {MAX_GRAMMAR_BYTES} bytes are allowed")
    if any(not math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidSubmitError("sampling.logit_bias", "every bias must be finite")


def _check_ids(field: str, ids: Sequence[int] | Iterable[int], vocab_size: int) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise InvalidSubmitError(field, f"token id {worst} is outside the vocabulary of {vocab_size}")
