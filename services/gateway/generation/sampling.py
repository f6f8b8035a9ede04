"""From a body's sampling fields to the pipeline's options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from ryzanstein.v1 import worker_pb2

from services.common.attention import AttentionMode
from services.gateway.api.options import TextOptions
from services.gateway.errors import invalid
from services.gateway.generation.request import SamplingOptions
from services.gateway.text.codec import ServedModel

_ONE_TOKEN_P = 1e-9  # the likeliest token of any vocabulary has more
_MAX_IDS = 1024  # a worker's limit
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024  # all of a stop string is compared with the text at every token


def stop_strings(body: TextOptions, field: str) -> tuple[str, ...]:
    """The stop strings; raises :class:`ApiError` (400) when `field` has too many."""
    stops: Sequence[str] = () if body.stop is None else [body.stop] if isinstance(body.stop, str) else body.stop
    for stop in stops:
        if len(stop) > _MAX_STOP_CHARS:
            message = f"A stop string may have at most {_MAX_STOP_CHARS} characters, got {len(stop)}."
            raise invalid(message, field, "invalid_value")
    if len(stops) > _MAX_STOPS:
        raise invalid(f"`{field}` may hold at most {_MAX_STOPS} strings, got {len(stops)}.", field, "invalid_value")
    return tuple(stops)


def check_token_ids(body: TextOptions, vocab_size: int) -> None:
    """Refuse too many ids and ids outside of the vocabulary; raises :class:`ApiError` (400)."""
    for field, ids in (("logit_bias", body.logit_bias or ()), ("stop_token_ids", body.stop_token_ids or ())):
        if len(ids) > _MAX_IDS:
            raise invalid(f"`{field}` may hold at most {_MAX_IDS} tokens, got {len(ids)}.", field, "invalid_value")
        worst = max(ids, default=0)
        if worst >= vocab_size:
            message = f"`{field}` names token {worst}; ids of this model are 0 to {vocab_size - 1}."
            raise invalid(message, field, "invalid_value")


def sampling_options(
    body: TextOptions,
    model: ServedModel,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: str = "",
    stop_field: str = "stop",
) -> SamplingOptions:
    """The options of a body, the model's defaults where it names none; raises :class:`ApiError` (400)."""
    defaults, min_tokens = model.sampling_defaults, body.min_tokens or 0
    if min_tokens > max_tokens:
        message = f"`min_tokens` ({min_tokens}) is larger than the number of tokens to generate ({max_tokens})."
        raise invalid(message, "min_tokens", "invalid_value")
    top_p = _given(body, defaults, "top_p", 1.0)
    alone = top_p < _ONE_TOKEN_P
    return SamplingOptions(
        max_tokens=max_tokens,
        temperature=_given(body, defaults, "temperature", 1.0),
        top_p=1.0 if alone else top_p,
        top_k=1 if alone else max(0, int(_given(body, defaults, "top_k", 0))),
        min_p=_given(body, defaults, "min_p", 0.0),
        repetition_penalty=_given(body, defaults, "repetition_penalty", 1.0),
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=body.logit_bias or {},
        seed=body.seed,
        min_tokens=min_tokens,
        stop=stop_strings(body, stop_field),
        include_stop=bool(body.include_stop_str_in_output),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=body.skip_special_tokens is not False,
        grammar=grammar,
        attention=_attention(body.attention, model),
    )


def _attention(text: str | None, model: ServedModel) -> worker_pb2.Attention | None:
    """The attention of a text, that of the model's workers if the body names none; raises :class:`ApiError` (400)."""
    card = model.card
    if text is None:
        return card.attention if card.HasField("attention") else None
    try:
        mode = AttentionMode.parse(text)
    except ValueError as error:
        raise invalid(f"Invalid value for `attention`: {error}.", "attention", "invalid_value") from error
    if mode == AttentionMode():
        return None
    if mode.name not in card.attention_modes:
        able = ", ".join(("dense", *card.attention_modes))
        message = f"`attention` {mode} is not available: the model's workers compute {able}."
        raise invalid(message, "attention", "unsupported_field")
    return worker_pb2.Attention(**asdict(mode))


def _given(body: TextOptions, defaults: Mapping[str, float], field: str, neutral: float) -> float:
    value: float | None = getattr(body, field)
    return defaults.get(field, neutral) if value is None else value
