"""Converts a Submit frame to a request and checks every field."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ryzanstein.v1 import worker_pb2 as pb

from services.common.attention import AttentionMode
from services.common.grammar import MAX_GRAMMAR_BYTES
from services.common.worker_options import MAX_WEIGHT
from services.worker.api.images import check_images
from services.worker.engine.errors import InvalidRequestError
from services.worker.engine.request import AdapterRef, EngineRequest
from services.worker.engine.state import EngineFacts, EngineModel

MAX_LOGPROBS = 20
MAX_STOP_TOKENS = 1024
MAX_LOGIT_BIAS = 1024
MIN_REPETITION_PENALTY = 1e-3  # a lower penalty would scale logits beyond float32's range


def unchecked(submit: pb.Submit) -> EngineRequest:
    """The request of a frame, without checks."""
    return EngineRequest(
        request_id=submit.request_id,
        attempt=submit.attempt,
        prompt_ids=list(submit.prompt_ids),
        generated_ids=list(submit.generated_ids),
        sampling=submit.sampling,
        tenant=submit.tenant,
        weight=submit.weight or 1,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        embed=submit.embed,
        second_from=submit.second_from,
        trial_tokens=submit.trial_tokens,
        adapter=_adapter(submit),
        pull=submit.pull if submit.HasField("pull") else None,
        standby=submit.standby if submit.HasField("standby") else None,
        prediction_ids=list(submit.prediction_ids),
        images=list(submit.images),
    )


def _adapter(submit: pb.Submit) -> AdapterRef | None:
    return (
        AdapterRef(submit.adapter.digest, submit.adapter.source, submit.adapter.name)
        if submit.HasField("adapter")
        else None
    )


def to_request(submit: pb.Submit, model: EngineModel, facts: EngineFacts) -> EngineRequest:
    """The request for the engine; raises InvalidRequestError naming the first bad field."""
    request = unchecked(submit)
    n_generated, max_tokens = len(request.generated_ids), submit.sampling.max_tokens
    if not request.request_id:
        raise InvalidRequestError("request_id", "must not be empty")
    if not request.prompt_ids:
        raise InvalidRequestError("prompt_ids", "must not be empty")
    _check_ids("prompt_ids", request.prompt_ids, facts.vocab_size)
    _check_ids("generated_ids", request.generated_ids, facts.vocab_size)
    _check_ids("prediction_ids", request.prediction_ids, facts.vocab_size)
    if not request.embed and not model.generates:
        does = "classifies" if model.classes else "embeds"
        raise InvalidRequestError("embed", f"this checkpoint has no output head: it {does} and cannot generate")
    if request.second_from >= len(request.prompt_ids):
        message = f"{request.second_from} is not a position of the {len(request.prompt_ids)} prompt tokens"
        raise InvalidRequestError("second_from", message)
    if request.embed and n_generated:
        raise InvalidRequestError("generated_ids", "must be empty when embed is set")
    if request.weight > MAX_WEIGHT:
        raise InvalidRequestError("weight", f"{request.weight} is above {MAX_WEIGHT}")
    check_images(request, model.images)
    sampling = _checked(submit.sampling, model, facts)
    if max_tokens and n_generated >= max_tokens and not request.embed:
        raise InvalidRequestError("sampling.max_tokens", f"{n_generated} tokens are generated already")
    return replace(request, sampling=sampling)


def _checked(sampling: pb.Sampling, model: EngineModel, facts: EngineFacts) -> pb.Sampling:
    """The checked message for the engine; its stop ids include all ids that end the text."""
    _check_ranges(sampling)
    _check_attention(sampling.attention, model)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
    _check_ids("sampling.logit_bias", sampling.logit_bias, facts.vocab_size)
    ours = pb.Sampling()  # a copy, because a submessage keeps the whole frame in memory
    ours.CopyFrom(sampling)
    ours.top_k = min(sampling.top_k, facts.vocab_size)
    if sampling.grammar or not sampling.ignore_eos:  # a grammar may allow nothing but EOS
        del ours.stop_token_ids[:]
        ours.stop_token_ids.extend(dict.fromkeys((*model.eos_token_ids, *sampling.stop_token_ids)))
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
            raise InvalidRequestError(f"sampling.{field}", f"{value} is not in [{low}, {high}]")
    if 0 < sampling.repetition_penalty < MIN_REPETITION_PENALTY:
        message = f"{sampling.repetition_penalty} is below {MIN_REPETITION_PENALTY}"
        raise InvalidRequestError("sampling.repetition_penalty", message)
    if sampling.max_tokens and sampling.min_tokens > sampling.max_tokens:
        message = f"{sampling.min_tokens} is above max_tokens {sampling.max_tokens}"
        raise InvalidRequestError("sampling.min_tokens", message)
    for field, length, most in (
        ("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKENS),
        ("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS),
    ):
        if length > most:
            raise InvalidRequestError(f"sampling.{field}", f"{length} entries; at most {most} are allowed")
    if len(sampling.grammar.encode()) > MAX_GRAMMAR_BYTES:
        raise InvalidRequestError("sampling.grammar", f"at most {MAX_GRAMMAR_BYTES} bytes are allowed")
    if any(not math.isfinite(bias) for bias in sampling.logit_bias.values()):
        raise InvalidRequestError("sampling.logit_bias", "every bias must be finite")


def _check_attention(attention: pb.Attention, model: EngineModel) -> None:
    mode = AttentionMode(attention.sinks, attention.window, attention.pages)
    if problem := mode.problem():
        raise InvalidRequestError("sampling.attention", problem)
    if mode != AttentionMode() and mode.name not in model.attention_modes:
        able = ", ".join(("dense", *model.attention_modes))
        raise InvalidRequestError("sampling.attention", f"{mode} is not available: this worker computes {able}")


def _check_ids(field: str, ids: Sequence[int] | Iterable[int], vocab_size: int) -> None:
    worst = max(ids, default=0)
    if worst >= vocab_size:
        raise InvalidRequestError(field, f"token id {worst} is outside the vocabulary of {vocab_size}")
