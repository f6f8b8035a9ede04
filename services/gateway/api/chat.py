"""The chat request that chat completions, Responses and Messages share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from services.gateway.api.files import GivenFile
from services.gateway.api.images import GivenImage
from services.gateway.api.options import FunctionDefinition, PredictedContent, TextOptions


class FieldNames(Struct, frozen=True):
    """The names of a chat's fields in one API, for errors that name the client's field."""

    messages: str = "messages"
    continued: str = "continue_final_message"
    tools: str = "tools"
    tool_choice: str = "tool_choice"
    format: str = "response_format"
    schema: str = "response_format.json_schema.schema"
    stop: str = "stop"


CHAT_COMPLETIONS = FieldNames()
Part = str | GivenImage | GivenFile  # one of those that make a message


class Call(Struct, frozen=True):
    """A call by the assistant."""

    name: str
    arguments: str  # JSON text; may be invalid, since the model wrote it
    id: str | None = None


class Turn(Struct):
    """A message of a conversation."""

    role: str
    parts: list[Part]
    name: str | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    calls: list[Call] = field(default_factory=list)


def thinking_variables(*, on: bool) -> dict[str, Any]:
    """The switch under the names of the chat templates: Qwen's and GLM's, DeepSeek's and Granite's."""
    return {"enable_thinking": on, "thinking": on}


class OfferedTools(Struct, frozen=True):
    """The functions that a client offers, and the function that the model must call."""

    functions: Sequence[FunctionDefinition] = ()
    choice: str = "auto"  # auto, none, required, or the name of a function
    parallel: bool = True
    custom: frozenset[str] = frozenset()  # names of functions that are custom tools of a chat
    legacy: bool = False  # answers have a `function_call`


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The input of the chat pipeline, in which only `names` depends on the API."""

    turns: Sequence[Turn]
    names: FieldNames = CHAT_COMPLETIONS
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    tools: OfferedTools = OfferedTools()
    options: TextOptions = field(default_factory=TextOptions)
    n: int = 1
    max_tokens: int | None = None  # None: as many as fit
    logprobs: int | None = None  # the number of alternatives for each token
    include_workers: bool = False
    prediction: PredictedContent | None = None  # the expected answer
