"""Parts of a history, and tools, that the official clients' types allow are read or left out."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
from anthropic.types import beta
from openai.types import chat as openai_chat
from openai.types import responses as openai_responses

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.ignored import Ignored
from services.gateway.api.schema import ChatBody
from services.gateway.generation.chat_body import chat_of as of_completions
from services.gateway.http.messages.schema import MessagesBody
from services.gateway.http.messages.translation import sampled_chat_of
from services.gateway.http.responses.schema import ResponsesBody
from services.gateway.http.responses.tools import read_tools

HELLO = {"role": "user", "content": "hi"}
_PLAIN: dict[Any, Any] = {object: {}, int: 1, float: 1.0, bool: True, type(None): None}


def example(kind: Any, *, whole: bool, depth: int = 0) -> Any:
    """A value of a type, of an object the required fields, or some levels of all fields."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Annotated, Required, NotRequired, Union):
        return example(inner[0], whole=whole, depth=depth)
    if origin is Literal:
        return inner[0]
    if hasattr(kind, "__required_keys__"):  # a TypedDict
        hints = get_type_hints(kind, include_extras=True)
        required = {name for name, hint in hints.items() if get_origin(hint) is Required}
        names = hints if whole and depth < 3 else required | kind.__required_keys__
        return {name: example(hints[name], whole=whole, depth=depth + 1) for name in names}
    if origin in (list, Iterable):
        return [example(inner[0], whole=whole, depth=depth + 1)] if depth < 3 else []
    return {} if origin is dict else _PLAIN.get(kind, "x")


def members(union: Any) -> Iterator[Any]:
    """The objects of a union, also of unions in it."""
    if hasattr(union, "__required_keys__"):
        yield union
    for member in get_args(union) if get_origin(union) in (Union, Annotated) else ():
        yield from members(member)


def examples(union: Any) -> list[Any]:
    return [
        pytest.param(example(kind, whole=whole), id=f"{kind.__name__}-{'whole' if whole else 'needed'}")
        for kind in members(union)
        for whole in (False, True)
    ]


def decoded(body: dict[str, Any], kind: Any, ignored: Ignored) -> Any:
    return asyncio.run(BodyDecoder(kind).decode(json.dumps(body).encode(), ignored))


@pytest.mark.parametrize("block", examples(beta.BetaContentBlockParam))
def test_every_block_of_messages_may_be_in_a_history(block: dict[str, Any]) -> None:
    for role in ("user", "assistant"):
        ignored, turns = Ignored(), [HELLO, {"role": role, "content": [block]}, {"role": "assistant", "content": "a"}]
        chat = sampled_chat_of(decoded({"messages": [*turns, HELLO], "max_tokens": 1}, MessagesBody, ignored), ignored)
        assert chat.turns[-1].parts == ["hi"]


@pytest.mark.parametrize("tool", examples(beta.BetaToolUnionParam))
def test_every_tool_of_messages_is_offered_or_left_out(tool: dict[str, Any]) -> None:
    ignored = Ignored()
    body = decoded({"messages": [HELLO], "max_tokens": 1, "tools": [tool]}, MessagesBody, ignored)
    offered = sampled_chat_of(body, ignored).tools.functions
    assert bool(offered) != (f"tools[].type={tool.get('type')}" in ignored.names)


@pytest.mark.parametrize("message", examples(openai_chat.ChatCompletionMessageParam))
def test_every_message_of_chats_may_be_in_a_history(message: dict[str, Any]) -> None:
    ignored = Ignored()
    chat = of_completions(decoded({"messages": [HELLO, message, HELLO]}, ChatBody, ignored), 100, ignored)
    assert len(chat.turns) == 3


@pytest.mark.parametrize("tool", examples(openai_responses.ToolParam))
def test_every_tool_of_responses_is_offered_or_left_out(tool: dict[str, Any]) -> None:
    ignored = Ignored()
    body = decoded({"input": "a", "tools": [tool]}, ResponsesBody, ignored)
    offered = read_tools(body, [], 0, ignored).listed
    assert bool(offered) != (f"tools[].type={tool['type']}" in ignored.names)
