"""Converts a generation's chunks to gRPC messages."""

from __future__ import annotations

from ryzanstein.v1 import inference_pb2

from services.gateway.api.schema import ChatBody, CompletionBody
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.output import OutputChunk
from services.gateway.generation.tokens import FinishReason
from services.gateway.text.codec import ServedModel
from services.gateway.tools.calls import CallDelta
from services.gateway.usage import Usage


class ResponseWriter:
    """Writes the messages of a generation, created at the first chunk, when the model is final."""

    def __init__(self, request: AdmittedRequest, body: ChatBody | CompletionBody) -> None:
        self._request, self._prepared = request, request.prepared
        self._echo = isinstance(body, CompletionBody) and bool(body.echo)
        self._prompt = ""
        if isinstance(body, CompletionBody) and self._echo:
            given = body.prompt
            ids = self._prepared.generations[0].request.prompt_ids
            self._prompt = given if isinstance(given, str) else request.model.decode(ids)
        # The request scores only the prompt; the generated token is hidden.
        self._silent = isinstance(body, CompletionBody) and body.max_tokens == 0
        self._next_index = [0] * len(self._prepared.generations)
        self._unopened = set(range(len(self._prepared.generations)))
        self._running = len(self._prepared.generations)

    def response(self, choice: int, chunk: OutputChunk) -> inference_pb2.GenerateResponse:
        """The message of a chunk."""
        generation = self._prepared.generations[choice]
        response = inference_pb2.GenerateResponse(
            request_id=generation.request.request_id, first_index=self._next_index[choice], choice=choice
        )
        if choice in self._unopened:
            self._unopened.discard(choice)
            response.prompt_logprobs.extend(generation.prompt_logprobs)
            if self._echo:
                response.text = self._prompt
                response.prompt_ids.extend(generation.request.prompt_ids)
        if not self._silent:
            self._add(response, chunk)
            self._next_index[choice] += len(chunk.ids)
        if chunk.finish is not None:
            response.finish_reason = FinishReason.LENGTH if self._silent else chunk.finish
            self._running -= 1
            if not self._running:
                response.usage.CopyFrom(usage_message(self._request.used))
        return response

    def _add(self, response: inference_pb2.GenerateResponse, chunk: OutputChunk) -> None:
        response.text += chunk.text
        response.ids.extend(chunk.ids)
        if chunk.tokens:
            response.logprobs.extend(token.logprobs for token in chunk.tokens)
        if chunk.reasoning:
            response.reasoning = chunk.reasoning
        if chunk.calls:
            response.tool_calls.extend(map(_call_delta, chunk.calls))
        if chunk.takeover is not None and self._prepared.include_workers:
            response.worker.id, response.worker.attempt = chunk.takeover.worker, chunk.takeover.attempt
            response.worker.after, response.worker.resume = chunk.takeover.after, chunk.takeover.resume


def _call_delta(call: CallDelta) -> inference_pb2.ToolCallDelta:
    return inference_pb2.ToolCallDelta(
        index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments
    )


def model_message(name: str, model: ServedModel | None) -> inference_pb2.Model:
    """A model; `model` is None for an expected one that no worker has served yet."""
    if model is None:
        return inference_pb2.Model(id=name)
    resume = "" if model.card.only_embeds else model.resume
    return inference_pb2.Model(id=name, created=model.card.created, max_model_len=model.max_len, resume=resume)


def usage_message(usage: Usage) -> inference_pb2.Usage:
    """The usage of a call."""
    message = inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
    if usage.prediction is not None:
        message.accepted_prediction_tokens = usage.prediction.accepted_tokens
        message.rejected_prediction_tokens = usage.prediction.rejected_tokens
    if usage.cost is not None:
        message.cost = usage.cost
    return message
