"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from services.gateway.api.options import TextPart
from services.gateway.api.schema import ChatBody, Message
from services.gateway.errors import ApiError
from services.gateway.generation.chat_body import ChatBodyPreparer
from services.gateway.generation.choice import Choice
from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.output import Generation, OutputChunk, ScoredToken
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.http.documentation import EXAMPLE_MODEL, Documentation
from services.gateway.http.exchange import DONE, OPENAI_ERRORS
from services.gateway.http.serializer import Serializer
from services.gateway.text.codec import ServedModel
from services.gateway.tools.calls import CallDelta, call_deltas, call_json, function_json, join_calls
from services.gateway.usage import Usage, usage_json

_encode = msgspec.json.encode
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


class ChatSerializer(Serializer[ChatBody]):
    """Writes chat completions. The frames of plain text are built once, around the text."""

    def __init__(self, preparer: ChatBodyPreparer) -> None:
        self._preparer = preparer

    async def prepare(self, body: ChatBody, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Serializer`."""
        prepared = await self._preparer.prepare(body, model, caller)
        request_id = prepared.request_id
        self._legacy = bool(body.functions)
        options = body.stream_options
        self._common = {"id": request_id, "created": int(time.time()), "model": model.name}
        self._with_ids = bool(body.return_token_ids)
        self._usage_field = options is not None and bool(options.include_usage)
        self._running_usage = options is not None and bool(options.continuous_usage_stats)
        self._with_workers = options is not None and bool(options.include_workers)
        self._writer = LogprobWriter(model, body.top_logprobs or 0) if body.logprobs else None
        start = _encode({"id": request_id, "object": "chat.completion.chunk"} | self._common)[:-1]
        self._head = b"data: " + start + b',"choices":[{"index":'
        self._delta = b',"delta":{"content":'
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + self._usage_null + b"}\n\n"
        return prepared

    @property
    def _usage_null(self) -> bytes:
        return b',"usage":null' if self._usage_field else b""

    def opening(self, index: int, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        return self._frame(index, {"role": "assistant", "content": ""}, None, None, {}, generation)

    def _logprobs(self, tokens: Sequence[ScoredToken]) -> dict[str, Any] | None:
        return self._writer.chat(tokens) if self._writer else None

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        plain = not (chunk.calls or chunk.reasoning)
        takeover = chunk.takeover if self._with_workers else None
        quick = plain and chunk.finish is None and not self._with_ids and takeover is None
        if quick and not chunk.tokens and not self._running_usage:
            if not chunk.ids:
                return b""
            return b"%b%d%b%b%b" % (self._head, index, self._delta, _encode(chunk.text), self._tail)
        extra: dict[str, Any] = {"token_ids": chunk.ids} if self._with_ids else {}
        if takeover is not None:
            extra["worker"] = takeover.json()
        logprobs = self._logprobs(chunk.tokens) if chunk.tokens else None
        delta: dict[str, Any] = {"content": chunk.text} if chunk.text or (plain and chunk.finish is None) else {}
        if chunk.reasoning:
            delta["reasoning_content"] = chunk.reasoning
        if chunk.calls:
            delta |= self._calls_delta(chunk.calls)
        return self._frame(index, delta, logprobs, chunk.finish, extra, generation)

    def _calls_delta(self, calls: Sequence[CallDelta]) -> dict[str, Any]:
        if self._legacy:
            first = CallDelta(0)
            join_calls([first], (call for call in calls if call.index == 0))
            return {"function_call": function_json(first)}
        return {"tool_calls": call_deltas(calls)}

    def _frame(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: object,
        finish: str | None,
        extra: dict[str, Any],
        generation: Generation,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **extra}
        usage: dict[str, Any] = {"usage": None} if self._usage_field else {}
        if self._running_usage:
            usage = {"usage": usage_json(generation.usage)}
        return (
            b"data: "
            + _encode({"object": "chat.completion.chunk", **self._common, "choices": [choice], **usage})
            + b"\n\n"
        )

    async def ending(self, usage: Usage) -> bytes:
        """See :class:`Serializer`."""
        if not self._usage_field:
            return DONE
        chunk = {"object": "chat.completion.chunk", **self._common, "choices": [], "usage": usage_json(usage)}
        return b"data: " + _encode(chunk) + b"\n\n" + DONE

    def failure(self, error: ApiError) -> bytes:
        """See :class:`Serializer`."""
        return OPENAI_ERRORS.frames(error)

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        return {
            "object": "chat.completion",
            **self._common,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage_json(usage),
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
