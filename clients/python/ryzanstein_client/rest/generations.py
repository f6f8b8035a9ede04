"""Completions and chats over REST."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ryzanstein_client.options import ChatOptions, CompletionOptions
from ryzanstein_client.rest import answers, frames
from ryzanstein_client.rest.requests import Request, StreamRequest, post, post_stream
from ryzanstein_client.results import Completion
from ryzanstein_client.settings import Message, Prompt, Settings

_COMPLETIONS, _CHATS = "/v1/completions", "/v1/chat/completions"
_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def complete(settings: Settings, prompt: Prompt, options: CompletionOptions) -> Request[Completion]:
    """POST /v1/completions."""
    return post(_COMPLETIONS, completion_body(settings, prompt, options), answers.read_completion)


def stream_completion(settings: Settings, prompt: Prompt, options: CompletionOptions) -> StreamRequest:
    """POST /v1/completions, streamed."""
    body = completion_body(settings, prompt, options) | _STREAMED
    return post_stream(_COMPLETIONS, body, partial(frames.FrameReader, frames.text_frame))


def chat(settings: Settings, messages: Sequence[Message], options: ChatOptions) -> Request[Completion]:
    """POST /v1/chat/completions."""
    return post(_CHATS, chat_body(settings, messages, options), answers.read_chat)


def stream_chat(settings: Settings, messages: Sequence[Message], options: ChatOptions) -> StreamRequest:
    """POST /v1/chat/completions, streamed."""
    body = chat_body(settings, messages, options) | _STREAMED
    return post_stream(_CHATS, body, partial(frames.FrameReader, frames.chat_frame))


def completion_body(settings: Settings, prompt: Prompt, options: CompletionOptions) -> dict[str, Any]:
    """The body of a completion; raises TypeError for an option that completions do not have."""
    fields = settings.generation_fields(options, CompletionOptions)
    return {"prompt": prompt if isinstance(prompt, str) else list(prompt), **fields}


def chat_body(settings: Settings, messages: Sequence[Message], options: ChatOptions) -> dict[str, Any]:
    """The body of a chat, whose names for two options differ; raises TypeError for one that chats do not have."""
    fields = settings.generation_fields(options, ChatOptions)
    if "max_tokens" in fields:
        fields["max_completion_tokens"] = fields.pop("max_tokens")
    if "logprobs" in fields:
        fields["top_logprobs"] = fields.pop("logprobs")
        fields["logprobs"] = True
    if "prediction" in fields:
        fields["prediction"] = {"type": "content", "content": fields["prediction"]}
    if "tools" in fields:
        fields["tools"] = [{"type": "function", "function": tool} for tool in fields["tools"]]
    if fields.get("tool_choice", "auto") not in ("auto", "none", "required"):
        fields["tool_choice"] = {"type": "function", "function": {"name": fields["tool_choice"]}}
    return {"messages": list(map(_message, messages)), **fields}


def _message(message: Message) -> dict[str, Any]:
    optional = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    turn |= {name: value for name, value in optional.items() if value}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return turn
