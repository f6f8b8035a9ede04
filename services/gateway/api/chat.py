"""A chat, whichever API asks for it: what chat completions, Responses and Messages have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.api.options import FunctionDefinition, TextOptions


@dataclass(frozen=True, slots=True)
class FieldNames:
    """What an API calls the parts of a chat: an error names the field that its client has written."""

    messages: str = "messages"
    continued: str = "continue_final_message"
    tools: str = "tools"
    tool_choice: str = "tool_choice"
    format: str = "response_format"
    schema: str = "response_format.json_schema.schema"
    stop: str = "stop"


CHAT_COMPLETIONS = FieldNames()


@dataclass(frozen=True, slots=True)
class Call:
    """A call that the assistant made."""

    name: str
    arguments: str  # JSON, if the model wrote such
    id: str | None = None


@dataclass(slots=True)
class Turn:
    """A message of a conversation."""

    role: str
    texts: list[str]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    calls: list[Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class OfferedTools:
    """The functions that a client offers, and which of them the model must call."""

    functions: Sequence[FunctionDefinition] = ()
    choice: str = "auto"  # auto, none, required, or the name of a function
    parallel: bool = True
    legacy: bool = False  # answers have a `function_call`


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What the pipeline of chats works on; it knows no API but by `names`."""

    turns: Sequence[Turn]
    names: FieldNames = CHAT_COMPLETIONS
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    tools: OfferedTools = OfferedTools()
    options: TextOptions = field(default_factory=TextOptions)
    n: int = 1
    max_tokens: int | None = None  # what fits
    logprobs: int | None = None  # alternatives for each token
    include_workers: bool = False
    ignored_tools: Sequence[str] = ()  # hosted tools that the client offers, which there are none of here
