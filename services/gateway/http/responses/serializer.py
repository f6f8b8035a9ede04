"""Writes responses: one object, or the events by which it grows."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from services.gateway.errors import ApiError
from services.gateway.generation.choice import Choice
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.http.exchange import DONE, ApiDialect, ErrorShape
from services.gateway.http.responses.output import Event, OutputItems
from services.gateway.http.responses.schema import ResponsesBody
from services.gateway.http.serializer import Serializer
from services.gateway.usage import Usage

_encode = msgspec.json.encode
_IN_PROGRESS = "response.in_progress"


def _frame(event: Event) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), _encode(event))


def _error_frame(error: ApiError) -> bytes:
    event = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return _frame({**event, "status": error.status, "sequence_number": 0})


def _open_error_frame(error: ApiError) -> bytes:
    nested = {"type": "error", "error": error.body()["error"]}
    return _frame({**nested, "status": error.status, "sequence_number": 0}) + DONE


DIALECT = ApiDialect(errors=ErrorShape(frames=_error_frame))


class _ItemsChoice(Choice):
    """A whole answer, as items."""

    def __init__(self, output: OutputItems) -> None:
        super().__init__()
        self._output = output

    def add(self, chunk: OutputChunk) -> None:
        """See :class:`Choice`."""
        for _ in self._output.add(chunk):
            pass


class ResponseSerializer(Serializer[ResponsesBody]):
    """Writes one response.

    Its events are OpenAI's; with `open_names` those of Open Responses, whose streams end with `[DONE]`.
    """

    _facts: dict[str, Any]  # the response without what the answer adds
    _output: OutputItems
    _number = 0  # number of the next event
    _with_cost = False  # whether the usage has the cost
    _open_names = False

    @abstractmethod
    async def _keep(self, response: dict[str, Any]) -> bool:
        """Whether the response is kept now; raises :class:`ApiError` when that was demanded and is not possible."""

    def opening(self, index: int, generation: Generation) -> bytes:
        """See :class:`Serializer`; empty where an idle stream has been opened."""
        if self._number:
            return b""
        self._read_options(generation)
        return self._begun("response.created", _IN_PROGRESS)

    def idle_event(self, generation: Generation) -> bytes:
        """See :class:`Serializer`; clients take no event before the first, and a repeated state for none."""
        return self.opening(0, generation) or self._begun(_IN_PROGRESS)

    def _begun(self, *kinds: str) -> bytes:
        begun = self._response("in_progress", None)
        return self._frames({"type": kind, "response": begun} for kind in kinds)

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        return self._frames(self._output.add(chunk))

    def new_choice(self) -> Choice:
        """See :class:`Serializer`."""
        return _ItemsChoice(self._output)

    async def ending(self, usage: Usage) -> bytes:
        """See :class:`Serializer`."""
        frames = self._frames(self._output.close())
        return frames + self.last(await self._ended(usage))

    def last(self, response: dict[str, Any]) -> bytes:
        """The event that ends a stream with the whole response."""
        event = {"type": f"response.{response['status']}", "response": response}
        return self._frames([event]) + (DONE if self._open_names else b"")

    def failure(self, error: ApiError) -> bytes:
        """See :class:`Serializer`."""
        if not self._number:
            return _open_error_frame(error) if self._open_names else _error_frame(error)
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        code = "rate_limit_exceeded" if error.status == 429 else code
        failed = self._response("failed", None)
        failed |= {"store": False, "error": {"code": code, "message": error.message, "type": error.code}}
        return self.last(failed)

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        self._read_options(generations[0])
        for _ in self._output.close():
            pass
        return await self._ended(usage)

    def _read_options(self, generation: Generation) -> None:
        options = generation.request.options
        names = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        self._facts |= {name: getattr(options, name) for name in names}

    def _frames(self, events: Iterable[Event]) -> bytes:
        frames = []
        for event in events:
            event["sequence_number"] = self._number
            self._number += 1
            frames.append(_frame(event))
        return b"".join(frames)

    async def _ended(self, usage: Usage) -> dict[str, Any]:
        """The whole response, which is kept if it can be, and says so."""
        response = self._response("incomplete" if self._output.cut else "completed", usage)
        response["store"] = await self._keep(response)
        return response

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        response = self._facts | {"status": status, "output": self._output.items}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if status == "completed":
            response["completed_at"] = int(time.time())
        if usage is not None:
            cost = {"cost": usage.cost} if self._with_cost else {}
            response["usage"] = usage_of(usage, self._output.reasoning_tokens) | cost
        return response


def usage_of(usage: Usage, reasoning_tokens: int) -> dict[str, Any]:
    """The `usage` of a response."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
