"""The REST API's requests as values, each with the function that reads its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote, urlsplit

import msgspec

from ryzanstein_client.rest import answers, frames
from ryzanstein_client.results import Completion, Embeddings, Model
from ryzanstein_client.settings import Message, Options, Settings

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Request(Generic[Answer]):
    """A request with one answer."""

    method: Literal["GET", "POST", "DELETE"]
    path: str
    body: bytes
    read: Callable[[bytes], Answer]
    content_type: str = "application/json"
    repeatable: bool = True  # else it is not tried again where the server may have heard it


@dataclass(frozen=True, slots=True)
class StreamRequest:
    """A request whose answer is a stream."""

    path: str
    body: bytes
    read: Callable[[str], frames.Frame]


class Requests:
    """Builds requests with a client's settings."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def complete(self, prompt: str | Sequence[int], model: str | None, options: Options) -> Request[Completion]:
        """POST /v1/completions."""
        body = self.completion_body(prompt, model, options)
        return _post("/v1/completions", body, answers.read_completion)

    def stream_completion(self, prompt: str | Sequence[int], model: str | None, options: Options) -> StreamRequest:
        """POST /v1/completions, streamed."""
        body = self.completion_body(prompt, model, options) | _STREAMED
        return StreamRequest("/v1/completions", msgspec.json.encode(body), frames.text_frame)

    def chat(self, messages: Sequence[Message], model: str | None, options: Options) -> Request[Completion]:
        """POST /v1/chat/completions."""
        return _post("/v1/chat/completions", self.chat_body(messages, model, options), answers.read_chat)

    def stream_chat(self, messages: Sequence[Message], model: str | None, options: Options) -> StreamRequest:
        """POST /v1/chat/completions, streamed."""
        body = self.chat_body(messages, model, options) | _STREAMED
        return StreamRequest("/v1/chat/completions", msgspec.json.encode(body), frames.chat_frame)

    def embed(self, inputs: str | Sequence[str], model: str | None) -> Request[Embeddings]:
        """POST /v1/embeddings. base64 is a third of the size and exact."""
        body = {**self.model(model), "input": inputs, "encoding_format": "base64"}
        return _post("/v1/embeddings", body, answers.read_embeddings)

    def tokenize(self, text: str, model: str | None, *, add_special_tokens: bool) -> Request[tuple[int, ...]]:
        """POST /tokenize."""
        body = {**self.model(model), "prompt": text, "add_special_tokens": add_special_tokens}
        return _post("/tokenize", body, answers.read_tokens)

    def detokenize(self, token_ids: Sequence[int], model: str | None) -> Request[str]:
        """POST /detokenize."""
        return _post("/detokenize", {**self.model(model), "tokens": list(token_ids)}, answers.read_text)

    def models(self) -> Request[tuple[Model, ...]]:
        """GET /v1/models."""
        return Request("GET", "/v1/models", b"", answers.read_models)

    def completion_body(self, prompt: str | Sequence[int], model: str | None, options: Options) -> dict[str, Any]:
        """The body of a completion."""
        return {
            **self.model(model),
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            **self._settings.text_options(options),
        }

    def chat_body(self, messages: Sequence[Message], model: str | None, options: Options) -> dict[str, Any]:
        """The body of a chat, whose names for two options differ."""
        fields: dict[str, Any] = dict(self._settings.chat_options(options))
        if "max_tokens" in fields:
            fields["max_completion_tokens"] = fields.pop("max_tokens")
        if "logprobs" in fields:
            fields["top_logprobs"] = fields.pop("logprobs")
            fields["logprobs"] = True
        if "tools" in fields:
            fields["tools"] = [{"type": "function", "function": tool} for tool in fields["tools"]]
        if fields.get("tool_choice", "auto") not in ("auto", "none", "required"):
            fields["tool_choice"] = {"type": "function", "function": {"name": fields["tool_choice"]}}
        return {**self.model(model), "messages": list(map(_message, messages)), **fields}

    def model(self, model: str | None) -> dict[str, str]:
        """The field that names the model, if one is named."""
        name = self._settings.model if model is None else model
        return {"model": name} if name else {}


def _message(message: Message) -> dict[str, Any]:
    told = {"tool_call_id": message.tool_call_id, "name": message.name, "reasoning_content": message.reasoning}
    turn: dict[str, Any] = {"role": message.role, "content": message.content}
    turn |= {name: value for name, value in told.items() if value}
    if message.tool_calls:
        turn["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return turn


_STREAMED = {"stream": True, "stream_options": {"include_usage": True}}


def _post(path: str, body: Mapping[str, Any], read: Callable[[bytes], Answer]) -> Request[Answer]:
    return Request("POST", path, msgspec.json.encode(body), read)


def path_of(folder: str, name: str) -> str:
    """The path of an object; its id is no path of its own."""
    return f"{folder}/{quote(name, safe='')}"


def headers(settings: Settings) -> dict[str, str]:
    """Headers of every request."""
    key = {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}
    return {"content-type": "application/json", **key}


def check_url(url: str, schemes: Sequence[str]) -> str:
    """The URL without a slash at its end; raises ValueError when it is none of these schemes."""
    parts = urlsplit(url)
    if parts.scheme not in schemes or not parts.netloc:
        allowed = " or ".join(f"{scheme}://host:port" for scheme in schemes)
        raise ValueError(f"{url!r} must be {allowed}")
    return url.rstrip("/")
