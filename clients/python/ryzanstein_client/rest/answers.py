"""From the REST API's bodies to results and errors."""

from __future__ import annotations

import base64
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import parsedate_to_datetime
from typing import TypeVar

import msgspec

from ryzanstein_client.errors import ApiError, ErrorFields, ProtocolError, error_of_status
from ryzanstein_client.rest import wire
from ryzanstein_client.results import Completion, Embeddings, Model, TokenLogprob, ToolCall, ToolCallDelta, Usage

Body = TypeVar("Body")
_SHOWN_CHARS = 200  # longest shown part of an error body that is not the API's


def reader_of(kind: type[Body]) -> Callable[[bytes | str], Body]:
    """A function that decodes bodies of one kind; it raises :class:`ProtocolError`."""
    decoder = msgspec.json.Decoder(kind)

    def read(data: bytes | str) -> Body:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(f"the server's answer cannot be read: {error}") from error

    return read


def usage(sent: wire.Usage | None) -> Usage:
    """Usage, zero where the server reports none."""
    if sent is None:
        return Usage()
    prompt = sent.prompt_tokens_details or wire.PromptDetails()
    drafted = sent.completion_tokens_details or wire.CompletionDetails()
    return Usage(
        sent.prompt_tokens,
        sent.completion_tokens,
        prompt.cached_tokens,
        drafted.accepted_prediction_tokens,
        drafted.rejected_prediction_tokens,
    )


def item_usage(sent: wire.ItemUsage | None) -> Usage:
    """Usage of a response or a batch, zero where the server reports none."""
    if sent is None:
        return Usage()
    details = sent.input_tokens_details
    return Usage(sent.input_tokens, sent.output_tokens, details.cached_tokens if details else 0)


def text_logprobs(sent: wire.TextLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Logprobs of a completion."""
    if sent is None:
        return ()
    rows = zip(sent.tokens, sent.token_logprobs, sent.top_logprobs, strict=True)
    return tuple(
        TokenLogprob(logprob, text, top=tuple(TokenLogprob(value, other) for other, value in (top or {}).items()))
        for text, logprob, top in rows
        if logprob is not None
    )


def chat_logprobs(sent: wire.ChatLogprobs | None) -> tuple[TokenLogprob, ...]:
    """Logprobs of a chat."""
    return scored(sent.content) if sent is not None and sent.content else ()


def scored(tokens: Sequence[wire.ScoredText]) -> tuple[TokenLogprob, ...]:
    """Logprobs of a chat or a response."""
    return tuple(TokenLogprob(token.logprob, token.token, top=scored(token.top_logprobs)) for token in tokens)


def call_deltas(sent: Sequence[wire.ToolCall] | None) -> tuple[ToolCallDelta, ...]:
    """Pieces of calls."""
    return tuple(
        ToolCallDelta(call.index, call.id or "", call.function.name or "", call.function.arguments or "")
        for call in sent or ()
    )


def read_completion(data: bytes) -> Completion:
    """The answer of /v1/completions."""
    body = _text_body(data)
    choice = _only(body.choices)
    return Completion(
        text=choice.text,
        finish_reason=choice.finish_reason or "",
        usage=usage(body.usage),
        logprobs=text_logprobs(choice.logprobs),
        request_id=body.id,
        model=body.model,
    )


def read_chat(data: bytes) -> Completion:
    """The answer of /v1/chat/completions."""
    body = _chat_body(data)
    choice = _only(body.choices)
    return Completion(
        text=choice.message.content or "",
        finish_reason=choice.finish_reason or "",
        usage=usage(body.usage),
        logprobs=chat_logprobs(choice.logprobs),
        request_id=body.id,
        model=body.model,
        reasoning=choice.message.reasoning_content or "",
        tool_calls=tuple(
            ToolCall(call.id or "", call.function.name or "", call.function.arguments or "")
            for call in choice.message.tool_calls or ()
        ),
    )


def read_embeddings(data: bytes) -> Embeddings:
    """The answer of /v1/embeddings with base64."""
    body = _embedding_body(data)
    rows = sorted(body.data, key=lambda row: row.index)
    return Embeddings(tuple(_vector(row.embedding) for row in rows), usage(body.usage))


def _vector(encoded: str) -> tuple[float, ...]:
    try:
        return tuple(value for (value,) in struct.iter_unpack("<f", base64.b64decode(encoded, validate=True)))
    except (ValueError, struct.error) as error:
        raise ProtocolError(f"an embedding cannot be read: {error}") from error


def read_tokens(data: bytes) -> tuple[int, ...]:
    """The answer of /tokenize."""
    return tuple(_tokens_body(data).tokens)


def read_text(data: bytes) -> str:
    """The answer of /detokenize."""
    return _text_of_tokens(data).prompt


def read_models(data: bytes) -> tuple[Model, ...]:
    """The answer of /v1/models."""
    return tuple(map(_model, _models_body(data).data))


def read_model(data: bytes) -> Model:
    """The answer of /v1/models/{name}."""
    return _model(_model_card(data))


def _model(card: wire.ModelCard) -> Model:
    return Model(card.id, card.created, card.max_model_len)


def read_deleted(data: bytes) -> bool:
    """Whether something is removed."""
    return _deleted(data).deleted


def error_of_answer(status: int, headers: Mapping[str, str], body: bytes) -> ApiError:
    """The error of an answer that is not a success; `headers` by lower-case name."""
    return error_of_status(status, _fields(status, body), _retry_after(headers.get("retry-after", "")))


def error_fields(failure: wire.Failure) -> ErrorFields:
    """The fields of an error object."""
    code = None if failure.code is None else str(failure.code)
    return ErrorFields(failure.message, failure.type, failure.param, code)


def _fields(status: int, body: bytes) -> ErrorFields:
    try:
        return error_fields(_error_body(body).error)
    except ProtocolError:  # an error of a proxy or an ingress in between
        return ErrorFields(f"HTTP {status}: {body[:_SHOWN_CHARS].decode('utf-8', 'replace')}")


def _retry_after(value: str) -> float | None:
    """Seconds of a Retry-After header: a number or a date (RFC 9110, section 10.2.3); None when it is neither."""
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


Choice = TypeVar("Choice")


def _only(choices: Sequence[Choice]) -> Choice:
    if len(choices) != 1:
        raise ProtocolError(f"one choice was asked for, {len(choices)} came")
    return choices[0]


_text_body = reader_of(wire.TextBody)
_chat_body = reader_of(wire.ChatBody)
_embedding_body = reader_of(wire.EmbeddingBody)
_tokens_body = reader_of(wire.TokensBody)
_text_of_tokens = reader_of(wire.TextOfTokens)
_models_body = reader_of(wire.ModelsBody)
_model_card = reader_of(wire.ModelCard)
_deleted = reader_of(wire.Deleted)
_error_body = reader_of(wire.ErrorBody)
