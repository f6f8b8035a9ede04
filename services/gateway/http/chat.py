"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.json import encode

from services.gateway.api.options import TextPart
from services.gateway.api.schema import ChatBody, Message
from services.gateway.generation.chat_body import ChatBodyPreparer
from services.gateway.generation.choice import Choice
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.output import Generation, OutputChunk, ScoredToken
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.http.chunks import ChunkSerializer
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.text.codec import ServedModel
from services.gateway.tools.calls import CallDelta, call_deltas, call_json, function_json, join_calls
from services.gateway.usage import Usage

DOCUMENTED = Documentation(
    summary="Continue a conversation; server-sent events with `stream`",
    tag="generation",
    body=ChatBody,
    example={
        "model": EXAMPLE_MODEL,
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_completion_tokens": 32,
    },
    answer={
        "id": "chatcmpl-0d6f8f2c9b1e4a57a3c1d2e4",
        "object": "chat.completion",
        "created": 1767225600,
        "model": EXAMPLE_MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Blue.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 12,
            "completion_tokens": 3,
            "total_tokens": 15,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    },
    parts={"A message of `messages`": Message, "A part of a message's `content`": TextPart},
)


class ChatSerializer(ChunkSerializer[ChatBody]):
    """Writes chat completions."""

    def __init__(self, preparer: ChatBodyPreparer) -> None:
        self._preparer = preparer

    async def prepare(self, body: ChatBody, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Serializer`."""
        prepared = await self._preparer.prepare(body, model, caller)
        self._begin("chat.completion.chunk", prepared.request_id, model.name, body)
        self._legacy = bool(body.functions)
        self._writer = LogprobWriter(model, body.top_logprobs or 0) if body.logprobs else None
        return prepared

    def opening(self, index: int, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        delta = {"role": "assistant", "content": ""}
        return self._frame({"index": index, "delta": delta, "logprobs": None, "finish_reason": None}, generation)

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return self._writer.chat(tokens) if self._writer else None

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        plain = not (chunk.calls or chunk.reasoning)
        if plain and self._is_text(chunk):
            if not chunk.ids:
                return b""
            return b'%b%d,"delta":{"content":%b}%b' % (self._head, index, encode(chunk.text), self._tail)
        logprobs = self._logprobs(chunk.tokens) if chunk.tokens else None
        delta: dict[str, Any] = {"content": chunk.text} if chunk.text or (plain and chunk.finish is None) else {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.calls:
            delta |= self._calls_delta(chunk.calls)
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": chunk.finish}
        return self._frame(choice | self._extra(chunk), generation)

    def _calls_delta(self, calls: Sequence[CallDelta]) -> dict[str, Any]:
        if self._legacy:
            first = CallDelta(0)
            join_calls([first], (call for call in calls if call.index == 0))
            return {"function_call": function_json(first)}
        return {"tool_calls": call_deltas(calls)}

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        return {
            **self._common,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self._used(usage),
        }

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        return {
            "index": index,
            "message": self._message(choice),
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": choice.finish,
        } | ({"token_ids": choice.ids} if self._with_ids else {})

    def _message(self, choice: Choice) -> dict[str, Any]:
        content = None if choice.calls and not choice.text else choice.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls and self._legacy:
            message["function_call"] = function_json(choice.calls[0])
        elif choice.calls:
            message["tool_calls"] = [call_json(call) for call in choice.calls]
        return message
