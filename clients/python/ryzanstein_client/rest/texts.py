"""Embeddings, tokens and models over REST."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from ryzanstein_client.options import ChatOptions
from ryzanstein_client.rest import answers
from ryzanstein_client.rest.generations import chat_body
from ryzanstein_client.rest.requests import Request, get, model_field, post
from ryzanstein_client.results import Embeddings, Model
from ryzanstein_client.settings import Message, Settings

_OF_PROMPT = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs",
    "reasoning_effort",
)  # fmt: skip


def embed(settings: Settings, inputs: str | Sequence[str], model: str | None) -> Request[Embeddings]:
    """POST /v1/embeddings. base64 is a third of the size and exact."""
    body = {**model_field(settings, model), "input": inputs, "encoding_format": "base64"}
    return post("/v1/embeddings", body, answers.read_embeddings)


def tokenize(settings: Settings, text: str, model: str | None, *, add_special_tokens: bool) -> Request[tuple[int, ...]]:
    """POST /tokenize."""
    body = {**model_field(settings, model), "prompt": text, "add_special_tokens": add_special_tokens}
    return post("/tokenize", body, answers.read_tokens)


def tokenize_chat(settings: Settings, messages: Sequence[Message], options: ChatOptions) -> Request[tuple[int, ...]]:
    """POST /tokenize of messages. Options that do not change the prompt are not its business."""
    body = chat_body(settings, messages, options)
    if body.get("tool_choice") == "none":  # the prompt describes no tool then
        body.pop("tools", None)
    return post("/tokenize", {name: body[name] for name in _OF_PROMPT if name in body}, answers.read_tokens)


def detokenize(settings: Settings, token_ids: Sequence[int], model: str | None) -> Request[str]:
    """POST /detokenize."""
    return post("/detokenize", {**model_field(settings, model), "tokens": list(token_ids)}, answers.read_text)


def model(name: str) -> Request[Model]:
    """GET /v1/models/{name}; a name may have slashes."""
    return get(f"/v1/models/{quote(name)}", answers.read_model)


def models() -> Request[tuple[Model, ...]]:
    """GET /v1/models."""
    return get("/v1/models", answers.read_models)
