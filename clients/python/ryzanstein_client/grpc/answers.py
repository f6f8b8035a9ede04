"""From protobuf messages to results."""

from __future__ import annotations

from ryzanstein.v1 import inference_pb2, worker_pb2

from ryzanstein_client.results import Chunk, Embeddings, Model, TokenLogprob, ToolCallDelta, Usage


def chunk_of(found: inference_pb2.GenerateResponse, model: str) -> Chunk:
    """A message of a stream, which a model answers."""
    finished = bool(found.finish_reason)
    return Chunk(
        text=found.text,
        logprobs=tuple(map(_logprob, (*found.prompt_logprobs, *found.logprobs))),
        token_ids=tuple(found.ids),
        finish_reason=found.finish_reason if finished else None,
        usage=_usage(found.usage) if finished else None,
        request_id=found.request_id,
        model=model,
        reasoning=found.reasoning,
        tool_calls=tuple(ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in found.tool_calls),
    )


def _logprob(found: worker_pb2.TokenLogprobs) -> TokenLogprob:
    pairs = zip(found.top_ids, found.top_logprobs, strict=True)
    top = tuple(TokenLogprob(logprob, token_id=token_id) for token_id, logprob in pairs)
    return TokenLogprob(found.logprob, token_id=found.token_id, top=top)


def _usage(found: inference_pb2.Usage) -> Usage:
    return Usage(
        found.prompt_tokens,
        found.completion_tokens,
        found.cached_tokens,
        found.accepted_prediction_tokens,
        found.rejected_prediction_tokens,
    )


def embeddings_of(found: inference_pb2.EmbedResponse) -> Embeddings:
    """Vectors."""
    return Embeddings(tuple(tuple(row.values) for row in found.data), _usage(found.usage))


def models_of(found: inference_pb2.ListModelsResponse) -> tuple[Model, ...]:
    """The served models."""
    return tuple(Model(model.id, model.created, model.max_model_len) for model in found.models)
