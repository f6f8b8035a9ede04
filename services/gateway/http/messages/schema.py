"""The bodies of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from services.gateway.api.fields import ADVISORY, neutral
from services.gateway.api.ignored import Unserved
from services.gateway.api.options import (
    MAX_TOOLS,
    AttentionName,
    ChosenModel,
    FunctionName,
    KeepAlive,
    NonEmpty,
    Priority,
    Session,
)


class TextBlock(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """Text."""

    text: Annotated[str | None, Meta(description="null: empty")]
    cache_control: Annotated[Any, ADVISORY] = None
    citations: Annotated[Any, ADVISORY] = None


TextualBlock = TextBlock | Unserved


class ThinkingBlock(Struct, tag_field="type", tag="thinking", forbid_unknown_fields=True):
    """The assistant's reasoning; the chat template gets it."""

    thinking: str | None = None
    signature: Annotated[Any, ADVISORY] = None
    cache_control: Annotated[Any, ADVISORY] = None


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking", forbid_unknown_fields=True):
    """Thoughts that are encrypted; left out of the prompt."""

    data: Annotated[Any, ADVISORY] = None


class ToolUseBlock(Struct, tag_field="type", tag="tool_use", forbid_unknown_fields=True):
    """A call that the assistant made."""

    id: NonEmpty
    name: NonEmpty
    input: Annotated[Any, Meta(description="An object, or its JSON text")] = None
    cache_control: Annotated[Any, ADVISORY] = None
    caller: Annotated[Any, ADVISORY] = None
    toolset_name: Annotated[Any, ADVISORY] = None


class ToolResultBlock(Struct, tag_field="type", tag="tool_result", forbid_unknown_fields=True):
    """The result of a call."""

    tool_use_id: NonEmpty
    content: str | list[TextualBlock] | None = None
    is_error: Annotated[bool, Meta(description="Its text is marked as an error in the prompt")] | None = None
    cache_control: Annotated[Any, ADVISORY] = None
    toolset_name: Annotated[Any, ADVISORY] = None


Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | Unserved


ROLES = ("assistant", "developer", "system", "user")


class MessageParam(Struct, forbid_unknown_fields=True):
    """A message. The last one may be the beginning of the assistant's answer."""

    is_turn: ClassVar = True
    role: Annotated[str, Meta(description=f"One of {', '.join(ROLES)}; in a history others are left out")]
    content: Annotated[str | list[Block] | None, Meta(description="null: empty")]


class ClientTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client's own."""

    name: FunctionName
    input_schema: Annotated[dict[str, Any], Meta(description="A JSON Schema of the input")]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: Annotated[bool, Meta(description="Calls follow the schema whatever the model would write")] | None = None
    cache_control: Annotated[Any, ADVISORY] = None
    eager_input_streaming: Annotated[Any, ADVISORY] = None
    input_examples: Annotated[Any, ADVISORY] = None
    allowed_callers: Annotated[Any, ADVISORY] = None
    defer_loading: Annotated[Any, ADVISORY] = None


class AutoChoice(Struct, tag_field="type", tag="auto", forbid_unknown_fields=True):
    """The model may call tools."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Struct, tag_field="type", tag="any", forbid_unknown_fields=True):
    """The model must call one."""

    disable_parallel_tool_use: bool | None = None


class OneChoice(Struct, tag_field="type", tag="tool", forbid_unknown_fields=True):
    """The model must call this one."""

    name: str
    disable_parallel_tool_use: bool | None = None


class NoChoice(Struct, tag_field="type", tag="none", forbid_unknown_fields=True):
    """The prompt describes no tool."""


Choice = AutoChoice | AnyChoice | OneChoice | NoChoice


class ThinkingOn(Struct, tag_field="type", tag="enabled", forbid_unknown_fields=True):
    """The chat template switches thinking on."""

    budget_tokens: Annotated[Any, ADVISORY] = None
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(Struct, tag_field="type", tag="adaptive", forbid_unknown_fields=True):
    """As `enabled`."""

    display: Literal["summarized", "omitted"] | None = None


class ThinkingOff(Struct, tag_field="type", tag="disabled", forbid_unknown_fields=True):
    """The chat template switches thinking off, and the answer has no thoughts."""


class JsonFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer's text is JSON by a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """The answer's form."""

    effort: Annotated[str, Meta(description="`reasoning_effort` for the chat template")] | None = None
    format: JsonFormat | None = None
    task_budget: Annotated[Any, ADVISORY] = None


class Metadata(Struct, forbid_unknown_fields=True):
    """Of a request."""

    user_id: Annotated[Session, Meta(description="Keeps a user's requests on one worker")] | None = None


class CountBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens: what makes the prompt."""

    messages: Annotated[list[MessageParam], Meta(min_length=1)]
    model: ChosenModel | None = None
    system: str | list[TextualBlock] | None = None
    tools: (
        Annotated[
            list[dict[str, Any]],
            Meta(
                max_length=MAX_TOOLS,
                description="Of the type custom; Anthropic's own are left out",
            ),
        ]
        | None
    ) = None
    tool_choice: Choice | None = None
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = None
    output_config: OutputConfig | None = None
    output_format: Annotated[JsonFormat, Meta(description="Older name of output_config.format")] | None = None
    cache_control: Annotated[Any, ADVISORY] = None
    context_management: Annotated[Any, ADVISORY] = None
    client_metadata: Annotated[Any, ADVISORY] = None
    speed: Annotated[Any, ADVISORY] = None
    user_profile_id: Annotated[Any, ADVISORY] = None
    billing_policy: Annotated[Any, ADVISORY] = None
    compaction: Annotated[Any, neutral()] = None
    mcp_servers: Annotated[Any, Meta(description="Left out, as their tools are"), ADVISORY] = None


class MessagesBody(CountBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Meta(ge=1, description="More than fits ends at the context's end")]
    stream: bool | None = None
    stop_sequences: list[NonEmpty] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1, description="0 keeps the likeliest token only")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=0xFFFFFFFF, description="0 and -1 are off")] | None = None
    metadata: Metadata | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    session_id: Annotated[Session, Meta(description="Requests of a session stay on one worker")] | None = None
    priority: Priority | None = None
    keep_alive: KeepAlive | None = None
    attention: AttentionName | None = None
    include_cost: Annotated[bool, Meta(description="Adds `cost` to the usage of the whole answer")] | None = None
    service_tier: Annotated[Any, ADVISORY] = None
    inference_geo: Annotated[Any, ADVISORY] = None
    diagnostics: Annotated[Any, ADVISORY] = None
    fallback_credit_token: Annotated[Any, ADVISORY] = None
    container: Annotated[Any, neutral()] = None
    fallbacks: Annotated[Any, neutral([])] = None
    thread: Annotated[Any, neutral()] = None

    @property
    def session(self) -> str:
        """The session, whose requests go to one worker; empty when the body names none."""
        return self.session_id or (self.metadata and self.metadata.user_id) or ""
