"""Embeddings, tokens and models over REST."""

from __future__ import annotations

from collections.abc import Sequence

from ryzanstein_client.rest import answers
from ryzanstein_client.rest.requests import Request, get, model_field, post
from ryzanstein_client.results import Embeddings, Model
from ryzanstein_client.settings import Settings


def embed(settings: Settings, inputs: str | Sequence[str], model: str | None) -> Request[Embeddings]:
    """POST /v1/embeddings. base64 is a third of the size and exact."""
    body = {**model_field(settings, model), "input": inputs, "encoding_format": "base64"}
    return post("/v1/embeddings", body, answers.read_embeddings)


def tokenize(settings: Settings, text: str, model: str | None, *, add_special_tokens: bool) -> Request[tuple[int, ...]]:
    """POST /tokenize."""
    body = {**model_field(settings, model), "prompt": text, "add_special_tokens": add_special_tokens}
    return post("/tokenize", body, answers.read_tokens)


def detokenize(settings: Settings, token_ids: Sequence[int], model: str | None) -> Request[str]:
    """POST /detokenize."""
    return post("/detokenize", {**model_field(settings, model), "tokens": list(token_ids)}, answers.read_text)


def models() -> Request[tuple[Model, ...]]:
    """GET /v1/models."""
    return get("/v1/models", answers.read_models)
