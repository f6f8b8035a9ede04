"""From protobuf messages to results."""

from __future__ import annotations

from ryzanstein.v1 import inference_pb2, worker_pb2

from ryzanstein_client.results import Chunk, Embeddings, Model, TokenLogprob, ToolCallDelta, Usage


def chunk_of(sent: inference_pb2.GenerateResponse, model: str) -> Chunk:
    """A message of a stream, which a model answers."""
    finished = bool(sent.finish_reason)
    return Chunk(
        text=sent.text,
        logprobs=tuple(map(_logprob, (*sent.prompt_logprobs, *sent.logprobs))),
        token_ids=tuple(sent.ids),
        finish_reason=sent.finish_reason if finished else None,
        usage=_usage(sent.usage) if finished else None,
        request_id=sent.request_id,
        model=model,
        reasoning=sent.reasoning,
        tool_calls=tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in sent.tool_calls),
    )


def _logprob(sent: worker_pb2.TokenLogprobs) -> TokenLogprob:
    pairs = zip(sent.top_ids, sent.top_logprobs, strict=True)
    top = tuple(TokenLogprob(logprob, token_id=token_id) for token_id, logprob in pairs)
    return TokenLogprob(sent.logprob, token_id=sent.token_id, top=top)


def _usage(sent: inference_pb2.Usage) -> Usage:
    return Usage(
        sent.prompt_tokens,
        sent.completion_tokens,
        sent.cached_tokens,
        sent.accepted_prediction_tokens,
        sent.rejected_prediction_tokens,
    )


def embeddings_of(sent: inference_pb2.EmbedResponse) -> Embeddings:
    """Vectors."""
    return Embeddings(tuple(tuple(row.values) for row in sent.data), _usage(sent.usage))


def models_of(sent: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """The served models."""
    return tuple(Model(model.id, model.created, model.max_model_len) for model in sent.models)
