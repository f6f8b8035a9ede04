"""The items of an answer as they come: every change is an event."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.generation.logprobs import LogprobWriter
from services.gateway.generation.output import OutputChunk, ScoredToken
from services.gateway.http.responses.schema import CustomTool
from services.gateway.http.responses.sealing import seal
from services.gateway.http.responses.tools import ToolOffer
from services.gateway.tools.calls import CallDelta
from services.gateway.tools.custom import input_of

Event = dict[str, Any]
_TEXT = "response.output_text"
# Beginnings of the types of events about reasoning: OpenAI's, and those of Open Responses.
_REASONING, _OPEN_REASONING = "response.reasoning_text", "response.reasoning"


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    item: dict[str, Any]
    index: int
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> Event:
        """The fields of every event of the item."""
        return {"item_id": self.item["id"], "output_index": self.index}


def _call_id(stem: str, index: int) -> str:
    """Nine letters and digits, all that Mistral's templates take; the same when the response is made again."""
    return hashlib.sha256(f"{stem}{index}".encode()).hexdigest()[:9]


class OutputItems:
    """Reads chunks; `items` are whole but for the last one, which `close` ends."""

    def __init__(
        self,
        stem: str,
        writer: LogprobWriter | None,
        offer: ToolOffer,
        *,
        sealed: bool = False,
        open_names: bool = False,
    ) -> None:
        """`stem` makes the ids of items; calls are of tools on `offer`; `sealed`: reasoning is also opaque.

        `open_names`: events are those of Open Responses.
        """
        self.items: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self.cut = False  # by a limit on tokens
        self._stem = stem
        self._sealed = sealed
        self._reasoning = _OPEN_REASONING if open_names else _REASONING
        self._writer = writer
        self._tools = {offered.name: offered for offered in offer.tools}
        self._open: _Open | None = None
        self._call = -1  # index of the open one

    def add(self, chunk: OutputChunk) -> Iterator[Event]:
        """Return the events of a chunk."""
        self.reasoning_tokens += chunk.reasoning_tokens
        if chunk.reasoning:
            yield from self._write("reasoning", self._reasoning, chunk.reasoning, ())
        if chunk.text or (chunk.tokens and self._is_open("message")):
            yield from self._write("message", _TEXT, chunk.text, chunk.tokens)
        for call in chunk.calls:
            yield from self._write_call(call)
        if chunk.finish is not None:
            self.cut = chunk.finish == "length"

    def close(self) -> Iterator[Event]:
        """The end; an answer without anything is an empty message."""
        if not self.items:
            yield from self._begin_text("message", _TEXT)
        yield from self._end("incomplete" if self.cut else "completed")

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open.item["type"] == kind

    def _begin(self, kind: str, prefix: str, **fields: Any) -> Iterator[Event]:
        yield from self._end("completed")
        index = len(self.items)
        item = {"id": f"{prefix}_{self._stem}{index:04x}", "type": kind, "status": "in_progress", **fields}
        self.items.append(item)
        self._open = _Open(item, index)
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(item)}

    def _begin_text(self, kind: str, part: str) -> Iterator[Event]:
        if kind == "message":
            yield from self._begin(kind, "msg", role="assistant", content=[])
        else:
            yield from self._begin(kind, "rs", summary=[], content=[])
        assert self._open is not None
        added = self._part(part, "", [])
        yield {"type": "response.content_part.added", **self._open.place, "content_index": 0, "part": added}

    def _write(self, kind: str, part: str, text: str, tokens: Sequence[ScoredToken]) -> Iterator[Event]:
        if not self._is_open(kind):
            yield from self._begin_text(kind, part)
        assert self._open is not None
        self._open.pieces.append(text)
        event = {"type": f"{part}.delta", **self._open.place, "content_index": 0, "delta": text}
        if part == _TEXT:
            scored = self._writer.chat(tokens)["content"] if self._writer else []
            self._open.logprobs += scored
            event["logprobs"] = scored
        yield event

    def _write_call(self, call: CallDelta) -> Iterator[Event]:
        if not (self._is_open("function_call") or self._is_open("custom_tool_call")) or call.index != self._call:
            self._call = call.index
            yield from self._begin_call(call)
        assert self._open is not None
        if call.arguments:
            self._open.pieces.append(call.arguments)
            if self._is_open("function_call"):
                kind = "response.function_call_arguments.delta"
                yield {"type": kind, **self._open.place, "delta": call.arguments}

    def _begin_call(self, call: CallDelta) -> Iterator[Event]:
        """By the name that the client has for the tool. The input of a custom tool waits until its JSON is whole."""
        called: dict[str, Any] = {"call_id": _call_id(self._stem, len(self.items)), "name": call.name}
        offered = self._tools.get(call.name or "")
        if offered is not None:
            called["name"] = offered.tool.name
            if offered.namespace:
                called["namespace"] = offered.namespace
        if offered is not None and isinstance(offered.tool, CustomTool):
            yield from self._begin("custom_tool_call", "ctc", input="", **called)
        else:
            yield from self._begin("function_call", "fc", arguments="", **called)

    def _end(self, status: str) -> Iterator[Event]:
        """Complete the open item, if there is one."""
        ended, self._open = self._open, None
        if ended is None:
            return
        item, text = ended.item, "".join(ended.pieces)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            kind = "response.function_call_arguments.done"
            yield {"type": kind, **ended.place, "name": item["name"], "arguments": text}
        elif item["type"] == "custom_tool_call":
            item["input"] = input_of(text)
            if item["input"]:
                yield {"type": "response.custom_tool_call_input.delta", **ended.place, "delta": item["input"]}
            yield {"type": "response.custom_tool_call_input.done", **ended.place, "input": item["input"]}
        else:
            kind = _TEXT if item["type"] == "message" else self._reasoning
            part = self._part(kind, text, ended.logprobs)
            item["content"] = [part]
            if kind != _TEXT and self._sealed:
                item["encrypted_content"] = seal(text)
            scored = {"logprobs": ended.logprobs} if kind == _TEXT else {}
            place = {**ended.place, "content_index": 0}
            yield {"type": f"{kind}.done", **place, "text": text, **scored}
            yield {"type": "response.content_part.done", **place, "part": part}
        yield {"type": "response.output_item.done", "output_index": ended.index, "item": dict(item)}

    @staticmethod
    def _part(kind: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
        if kind == _TEXT:
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "reasoning_text", "text": text}
