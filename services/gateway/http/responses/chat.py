"""From a response's body to the chat that answers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.gateway.api.chat import ChatRequest, FieldNames, Turn
from services.gateway.api.options import JsonSchemaFormat, ResponseFormat, TextOptions
from services.gateway.errors import invalid
from services.gateway.http.responses.history import turns_of
from services.gateway.http.responses.schema import Item, ResponsesBody, TextFormat
from services.gateway.http.responses.tools import ToolOffer, offered_tools

NAMES = FieldNames(messages="input", format="text.format", schema="text.format.schema")


def chat_of(body: ResponsesBody, items: Sequence[Item], offer: ToolOffer) -> ChatRequest:
    """The chat of a conversation's items; raises :class:`ApiError` (400)."""
    turns = turns_of(items, offer.ignored)
    if not turns:
        raise invalid("`input` is empty: at least one item is needed.", "input", "invalid_value")
    if body.instructions is not None:
        turns.insert(0, Turn("system", [body.instructions]))
    return ChatRequest(
        turns=turns,
        names=NAMES,
        variables=_variables(body),
        tools=offered_tools(body, offer),
        options=_options(body),
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
    )


def _variables(body: ResponsesBody) -> dict[str, Any]:
    effort = body.reasoning.effort if body.reasoning else None
    return ({} if effort is None else {"reasoning_effort": effort}) | (body.chat_template_kwargs or {})


def _options(body: ResponsesBody) -> TextOptions:
    return TextOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        seed=body.seed,
        attention=body.attention,
        response_format=_format(body.text.format if body.text else None),
    )


def _format(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat(type="json_object")
    if form.schema is None or form.name is None:
        missing = "text.format.schema" if form.schema is None else "text.format.name"
        raise invalid(f"Missing required field `{missing}`.", missing, "missing_field")
    schema = JsonSchemaFormat(form.name, form.schema, form.description, form.strict)
    return ResponseFormat(type="json_schema", json_schema=schema)
