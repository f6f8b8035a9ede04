"""The chunks that chat completions and completions share."""

from __future__ import annotations

import time
from typing import Any, TypeVar

from msgspec.json import encode

from services.gateway.api.schema import ChatBody, CompletionBody, StreamOptions
from services.gateway.errors import ApiError
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.http.exchange import DONE, OPENAI_ERRORS
from services.gateway.http.serializer import Serializer
from services.gateway.usage import Usage, usage_json

Body = TypeVar("Body", ChatBody, CompletionBody)


class ChunkSerializer(Serializer[Body]):
    """Writes chunks of choices. The frames of plain text are built once, around the text."""

    def _begin(self, kind: str, request_id: str, model: str, body: Body) -> None:
        """Begin chunks whose `object` is `kind`, with what the body wants of them."""
        options = body.stream_options or StreamOptions()
        self._common = {"id": request_id, "object": kind, "created": int(time.time()), "model": model}
        self._with_ids = bool(body.return_token_ids)
        self._with_cost = bool(options.include_cost)
        self._usage_field = bool(options.include_usage) or self._with_cost
        self._running_usage = bool(options.continuous_usage_stats)
        self._with_workers = bool(options.include_workers)
        if body.stream:
            self._head = b"data: " + encode(self._common)[:-1] + b',"choices":[{"index":'
            usage = b',"usage":null' if self._usage_field else b""
            self._tail = b',"logprobs":null,"finish_reason":null}]' + usage + b"}\n\n"

    def _is_text(self, chunk: OutputChunk) -> bool:
        """Whether a chunk is written as plain text."""
        more = chunk.tokens or self._with_ids or self._running_usage or (self._with_workers and chunk.takeover)
        return chunk.finish is None and not more

    def _extra(self, chunk: OutputChunk) -> dict[str, Any]:
        """The fields of a choice that the body has asked for."""
        extra: dict[str, Any] = {"token_ids": chunk.ids} if self._with_ids else {}
        return extra | ({"worker": chunk.takeover.json()} if self._with_workers and chunk.takeover else {})

    def _frame(self, choice: dict[str, Any], generation: Generation) -> bytes:
        usage: dict[str, Any] = {"usage": None} if self._usage_field else {}
        if self._running_usage:
            usage = {"usage": usage_json(self._usage(generation))}
        return b"data: " + encode({**self._common, "choices": [choice], **usage}) + b"\n\n"

    def _usage(self, generation: Generation) -> Usage:
        return generation.usage

    async def ending(self, usage: Usage) -> bytes:
        """See :class:`Serializer`."""
        if not self._usage_field:
            return DONE
        return b"data: " + encode({**self._common, "choices": [], "usage": self._used(usage)}) + b"\n\n" + DONE

    def _used(self, usage: Usage) -> dict[str, object]:
        """The usage of the whole answer."""
        return usage_json(usage) | ({"cost": usage.cost} if self._with_cost else {})

    def failure(self, error: ApiError) -> bytes:
        """See :class:`Serializer`."""
        return OPENAI_ERRORS.frames(error)
