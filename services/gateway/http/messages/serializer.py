"""Answers as Anthropic's API writes them: messages of content blocks, whole or as events."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from enum import Enum
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import replace

from services.gateway.errors import ApiError
from services.gateway.generation.chat import ChatPreparer
from services.gateway.generation.choice import Choice
from services.gateway.generation.output import Generation, OutputChunk
from services.gateway.generation.prepared import Prepared
from services.gateway.generation.request import Caller
from services.gateway.generation.tokens import FinishReason
from services.gateway.http.messages.errors import error_frames
from services.gateway.http.messages.schema import MessagesBody, ThinkingAdaptive, ThinkingOff, ThinkingOn
from services.gateway.http.messages.translation import sampled_chat_of, translated
from services.gateway.http.serializer import Serializer
from services.gateway.ids import new_id
from services.gateway.text.codec import ServedModel
from services.gateway.tools.calls import CallDelta
from services.gateway.usage import Usage

_encode = msgspec.json.encode
PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class Thoughts(Enum):
    """Whether the answer shows reasoning."""

    SHOWN = "shown"
    OMITTED = "omitted"  # its block is empty
    LEFT_OUT = "left_out"


def _thoughts(body: MessagesBody) -> Thoughts:
    match body.thinking:
        case ThinkingOff():
            return Thoughts.LEFT_OUT
        case ThinkingOn(display="omitted") | ThinkingAdaptive(display="omitted"):
            return Thoughts.OMITTED
    return Thoughts.SHOWN


class MessagesSerializer(Serializer[MessagesBody]):
    """Writes one answer."""

    def __init__(self, chats: ChatPreparer) -> None:
        self._chats = chats

    async def prepare(self, body: MessagesBody, model: ServedModel, caller: Caller) -> Prepared:
        """See :class:`Serializer`."""
        chat = await translated(sampled_chat_of, body, model, caller.ignored)
        prompt = await self._chats.prompt(chat, model, caller.ignored)
        room = model.max_len - len(prompt.ids)
        self._full = 0 < room < body.max_tokens  # more tokens were asked for than the context has room for
        if self._full:
            chat = replace(chat, max_tokens=room)
        prepared = await self._chats.prepare(chat, model, caller, new_id("msg"), prompt)
        self._head = {"id": prepared.request_id, "type": "message", "role": "assistant", "model": model.name}
        self._thoughts, self._with_cost = _thoughts(body), bool(body.include_cost)
        self._blocks = _Blocks()
        return prepared

    def opening(self, index: int, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        message = self._message([], None, None, _usage(Usage(generation.usage.prompt_tokens)))
        return _event({"type": "message_start", "message": message})

    def frame(self, index: int, chunk: OutputChunk, generation: Generation) -> bytes:
        """See :class:`Serializer`."""
        blocks = self._blocks
        frames = b""
        if chunk.reasoning and self._thoughts is not Thoughts.LEFT_OUT:
            frames += blocks.think(chunk.reasoning, shown=self._thoughts is Thoughts.SHOWN)
        if chunk.calls and chunk.calls[0].name is None:  # the rest of a call stands before what follows it
            frames += blocks.call(chunk.calls.pop(0))
        if chunk.text:
            frames += blocks.write(chunk.text)
        for call in chunk.calls:
            frames += blocks.call(call)
        if chunk.finish is None:
            return frames
        self._stopped = self._stop(chunk.finish, generation, called=blocks.called)
        return frames + blocks.end()

    async def ending(self, usage: Usage) -> bytes:
        """See :class:`Serializer`."""
        delta = dict(zip(("stop_reason", "stop_sequence"), self._stopped, strict=True))
        last = _event({"type": "message_delta", "delta": delta, "usage": self._used(usage)})
        return last + _event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        """See :class:`Serializer`."""
        return error_frames(error)

    async def body(self, choices: Sequence[Choice], generations: Sequence[Generation], usage: Usage) -> dict[str, Any]:
        """See :class:`Serializer`."""
        (choice,), (generation,) = choices, generations
        content: list[dict[str, Any]] = []
        if choice.reasoning and self._thoughts is not Thoughts.LEFT_OUT:
            shown = choice.reasoning if self._thoughts is Thoughts.SHOWN else ""
            content.append(_thinking(shown) | {"signature": _signature(blake2b(choice.reasoning.encode()).digest())})
        if choice.text.strip() or (choice.text and not choice.calls and not content):
            content.append(_text(choice.text))
        content += [_tool_use(call, _input(call.arguments)) for call in choice.calls]
        reason, sequence = self._stop(choice.finish, generation, called=bool(choice.calls))
        return self._message(content, reason, sequence, self._used(usage))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, sequence: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        stop = {"stop_reason": reason, "stop_sequence": sequence}
        return {**self._head, "content": content, **stop, "usage": usage}

    def _used(self, usage: Usage) -> dict[str, Any]:
        """The usage of the whole answer."""
        return _usage(usage) | ({"cost": usage.cost} if self._with_cost else {})

    def _stop(self, finish: FinishReason, generation: Generation, *, called: bool) -> tuple[str, str | None]:
        """Why the answer has ended, and which stop sequence did it."""
        if finish is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._full else "max_tokens", None
        if generation.stopped is not None:
            return "stop_sequence", generation.stopped
        return "tool_use" if called else "end_turn", None


class _Blocks:
    """Content blocks as events. One is open at a time; blank text waits until it is known not to be all there is."""

    def __init__(self) -> None:
        self.called = False
        self._index = -1
        self._kind = ""
        self._blank = ""
        self._thought = blake2b()

    def think(self, text: str, *, shown: bool) -> bytes:
        """Return the frames of more reasoning."""
        frames = b"" if self._kind == "thinking" else self._begin(_thinking(""))
        self._thought.update(text.encode())
        return frames + (self._delta("thinking_delta", "thinking", text) if shown else b"")

    def write(self, text: str) -> bytes:
        """Return the frames of more text."""
        if self._kind == "text":
            return self._delta("text_delta", "text", text)
        self._blank += text
        return b"" if self._blank.isspace() else self._write_held()

    def call(self, call: CallDelta) -> bytes:
        """Return the frames of a call that begins, or of its next arguments."""
        frames = b""
        if call.name is not None:
            self.called, self._blank = True, ""
            frames = self._begin(_tool_use(call, {}))
        return frames + (self._delta("input_json_delta", "partial_json", call.arguments) if call.arguments else b"")

    def end(self) -> bytes:
        """The answer has ended."""
        frames = self._write_held() if self._blank and self._index < 0 else b""
        return frames + self._close()

    def _write_held(self) -> bytes:
        text, self._blank = self._blank, ""
        return self._begin(_text("")) + self._delta("text_delta", "text", text)

    def _begin(self, block: dict[str, Any]) -> bytes:
        frames = self._close()
        self._index, self._kind = self._index + 1, block["type"]
        frames += _event({"type": "content_block_start", "index": self._index, "content_block": block})
        return frames if self._index else frames + PING

    def _close(self) -> bytes:
        if not self._kind:
            return b""
        signed = b""
        if self._kind == "thinking":
            signed = self._delta("signature_delta", "signature", _signature(self._thought.digest()))
            self._thought = blake2b()
        self._kind = ""
        return signed + _event({"type": "content_block_stop", "index": self._index})

    def _delta(self, kind: str, key: str, text: str) -> bytes:
        return _event({"type": "content_block_delta", "index": self._index, "delta": {"type": kind, key: text}})


def _event(data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), _encode(data))


def _usage(usage: Usage) -> dict[str, int | None]:
    """All tokens of the prompt are `input_tokens`; cached tokens are not counted separately."""
    cache = {"cache_creation_input_tokens": None, "cache_read_input_tokens": None}
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens, **cache}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _thinking(text: str) -> dict[str, Any]:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _signature(digest: bytes) -> str:
    """A signature that is never checked; without one, clients do not send thoughts back."""
    return base64.b64encode(digest[:18]).decode()


def _tool_use(call: CallDelta, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _input(text: str) -> dict[str, Any]:
    """The arguments; they may be invalid JSON if they were cut off, or written without a grammar."""
    try:
        arguments: dict[str, Any] = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {"INVALID_JSON": text}  # the form that Anthropic tells clients to send back
    return arguments
