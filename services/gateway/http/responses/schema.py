"""The body of /v1/responses, and what its lists may hold."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.gateway.api.fields import ADVISORY, neutral
from services.gateway.api.ignored import Unserved
from services.gateway.api.options import (
    MAX_TOOLS,
    AttentionName,
    ChosenModel,
    FunctionName,
    KeepAlive,
    Labels,
    NonEmpty,
    Penalty,
    Priority,
    Probability,
    Session,
)

SEALED = "reasoning.encrypted_content"
ResponseId = Annotated[str, Meta(max_length=256)]

# --- items of `input` ----------------------------------------------------------------------------------------------


class InputText(Struct, tag_field="type", tag="input_text", forbid_unknown_fields=True):
    """A text of any role."""

    text: Annotated[str | None, Meta(description="null: empty")]
    prompt_cache_breakpoint: Annotated[Any, ADVISORY] = None


class OutputText(Struct, tag_field="type", tag="output_text", forbid_unknown_fields=True):
    """Text that the model wrote."""

    text: Annotated[str | None, Meta(description="null: empty")]
    annotations: Annotated[Any, ADVISORY] = None
    logprobs: Annotated[Any, ADVISORY] = None


class Refusal(Struct, tag_field="type", tag="refusal", forbid_unknown_fields=True):
    """The model's refusal."""

    refusal: str | None

    @property
    def text(self) -> str | None:
        """The text, under the name that other parts use."""
        return self.refusal


Part = InputText | OutputText | Refusal | Unserved
Content = str | list[Part] | None  # None: empty


class _Listed(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of items that were listed by an earlier response."""

    id: str | None = None
    status: Annotated[Any, ADVISORY] = None


class _OfCall(_Listed, kw_only=True, forbid_unknown_fields=True):
    """Fields of calls and of their outputs."""

    call_id: NonEmpty
    caller: Annotated[Any, ADVISORY] = None


ROLES = ("assistant", "developer", "system", "user")


class MessageItem(_Listed, kw_only=True, forbid_unknown_fields=True):
    """A message; `type` may be left out."""

    role: Annotated[str, Meta(description=f"One of {', '.join(ROLES)}; in a history others are left out")]
    content: Content
    type: Literal["message"] = "message"
    phase: Annotated[Any, ADVISORY] = None


class CallItem(_OfCall, kw_only=True, forbid_unknown_fields=True):
    """A call that the model made."""

    name: str
    arguments: Annotated[Any, Meta(description="JSON text, or the object itself")] = None
    namespace: str | None = None
    type: Literal["function_call"] = "function_call"


class CallOutputItem(_OfCall, kw_only=True, forbid_unknown_fields=True):
    """The output of a call."""

    output: Content = None
    type: Literal["function_call_output"] = "function_call_output"
    name: str | None = None


class CustomCallItem(_OfCall, kw_only=True, forbid_unknown_fields=True):
    """A call of a custom tool, whose input is text."""

    name: str
    input: Annotated[Any, Meta(description="A text; the JSON text of other values")] = None
    namespace: str | None = None
    type: Literal["custom_tool_call"] = "custom_tool_call"


class CustomOutputItem(_OfCall, kw_only=True, forbid_unknown_fields=True):
    """The output of a custom tool's call."""

    output: Content = None
    type: Literal["custom_tool_call_output"] = "custom_tool_call_output"
    name: str | None = None


class ReasoningText(Struct, forbid_unknown_fields=True):
    """A part of a reasoning."""

    text: str | None = None
    type: str = "reasoning_text"


class ReasoningItem(_Listed, kw_only=True, forbid_unknown_fields=True):
    """How the model reasoned before what follows."""

    type: Literal["reasoning"] = "reasoning"
    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: Annotated[Any, Meta(description=f"From `include: [{SEALED}]`; read without `content`")] = None


class CompactionItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """A summary that takes the place of the items before it, as /v1/responses/compact returns it."""

    encrypted_content: Annotated[Any, Meta(description="As it was returned; that of other servers is left out")] = None
    type: Literal["compaction"] = "compaction"
    id: str | None = None
    created_by: Annotated[Any, ADVISORY] = None


class ReferenceItem(Struct, kw_only=True, forbid_unknown_fields=True):
    """An item of a response that is kept, by its id."""

    id: NonEmpty
    type: Literal["item_reference"] = "item_reference"


Item = (
    MessageItem
    | CallItem
    | CallOutputItem
    | CustomCallItem
    | CustomOutputItem
    | ReasoningItem
    | CompactionItem
    | Unserved
)
ITEMS: dict[str, type[Item | ReferenceItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "custom_tool_call": CustomCallItem,
    "custom_tool_call_output": CustomOutputItem,
    "reasoning": ReasoningItem,
    "compaction": CompactionItem,
    "item_reference": ReferenceItem,
}
TOOL_ITEMS = ("additional_tools", "tool_search_output")  # offer the model the tools that they list
COMMANDS = ("compaction_trigger", "configuration_update")  # items that are no history: they change the answer

# --- other parts of a body -----------------------------------------------------------------------------------------


class FunctionTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: FunctionName
    type: Literal["function"] = "function"
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Annotated[Any, ADVISORY] = None
    output_schema: Annotated[Any, ADVISORY] = None


class CustomTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """A tool whose input is text."""

    name: FunctionName
    type: Literal["custom"] = "custom"
    description: str | None = None
    format: Annotated[dict[str, Any], Meta(description="Shown to the model, and not enforced")] | None = None
    defer_loading: Annotated[Any, ADVISORY] = None


class NamespaceTool(Struct, kw_only=True, forbid_unknown_fields=True):
    """Functions and custom tools under a common name."""

    name: FunctionName
    tools: list[dict[str, Any]]
    type: Literal["namespace"] = "namespace"
    description: Annotated[Any, ADVISORY] = None


class ToolChoice(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function or a custom tool, by its name."""

    name: str
    type: Literal["function", "custom"] = "function"
    namespace: str | None = None


class ToolChoiceAllowed(Struct, kw_only=True, forbid_unknown_fields=True):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]
    type: Literal["allowed_tools"] = "allowed_tools"


class TextFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """Plain text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the text is to be."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, ADVISORY] = None


class ReasoningConfig(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the model reasons."""

    effort: Annotated[str, Meta(description="A variable for the chat template")] | None = None
    summary: Annotated[Any, ADVISORY] = None
    generate_summary: Annotated[Any, ADVISORY] = None
    context: Annotated[Any, ADVISORY] = None
    mode: Annotated[Any, ADVISORY] = None


class ResponseStreamOptions(Struct, forbid_unknown_fields=True):
    """How a stream reports."""

    include_obfuscation: Annotated[Any, ADVISORY] = None
    include_cost: (
        Annotated[
            bool, Meta(description="Adds `cost` to the usage of the whole answer; null for a model without a price")
        ]
        | None
    ) = None


class ConversationReference(Struct, forbid_unknown_fields=True):
    """A conversation, by its id."""

    id: ResponseId


LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class PromptBody(Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a response that make its prompt."""

    input: (
        Annotated[
            str | list[dict[str, Any]],
            Meta(
                description=f"A text, or items of the types {', '.join((*ITEMS, *TOOL_ITEMS))}; calls of hosted tools "
                "are read with their results, other items are left out; needed without previous_response_id"
            ),
        ]
        | None
    ) = None
    model: ChosenModel | None = None
    instructions: Annotated[str, Meta(description="Before everything else; not kept for the next turn")] | None = None
    previous_response_id: Annotated[ResponseId, Meta(description="A kept response to go on from")] | None = None
    conversation: (
        Annotated[
            ResponseId | ConversationReference,
            Meta(description="Its items come first; this turn's input and output are added to it"),
        ]
        | None
    ) = None
    tools: (
        Annotated[
            list[dict[str, Any]],
            Meta(
                max_length=MAX_TOOLS,
                description="Of the types function, custom and namespace; hosted tools are left out",
            ),
        ]
        | None
    ) = None
    tool_choice: (
        Annotated[
            str | dict[str, Any],
            Meta(description="none, auto, required, or an object of type function, custom or allowed_tools"),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    truncation: Annotated[Literal["auto", "disabled"], Meta(description="auto drops the oldest turns")] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(description="Variables for the chat template")] | None = None
    client_metadata: Annotated[Any, ADVISORY] = None


class ResponsesBody(PromptBody, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. null means the default everywhere."""

    background: (
        Annotated[bool, Meta(description="Answer at once, and run on without the client; needs `store`")] | None
    ) = None
    generate: Annotated[bool, Meta(description="false: keep the input as a turn without an answer")] | None = None
    store: (
        Annotated[bool, Meta(description="true: keep, or fail; left out: keep if possible, the answer's `store` says")]
        | None
    ) = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, description="Default: what fits")] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: Annotated[list[str], Meta(description=f"Only {LOGPROBS} and {SEALED} have an effect")] | None = None
    metadata: Labels | None = None
    prompt_cache_key: Annotated[Session, Meta(description="Keeps requests on one worker")] | None = None
    user: Annotated[Session, Meta(description="Keeps a user's requests on one worker")] | None = None
    safety_identifier: Annotated[Session, Meta(description="As `user`")] | None = None
    session_id: Annotated[Session, Meta(description="Requests of a session stay on one worker")] | None = None
    priority: Priority | None = None
    keep_alive: KeepAlive | None = None
    attention: AttentionName | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=0xFFFFFFFF, description="0 and -1 are off")] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    max_tool_calls: Annotated[Any, ADVISORY] = None
    service_tier: Annotated[Any, ADVISORY] = None
    prompt_cache_retention: Annotated[Any, ADVISORY] = None
    prompt_cache_options: Annotated[Any, ADVISORY] = None
    access_programs: Annotated[Any, ADVISORY] = None
    context_management: Annotated[Any, Meta(description="Left out: `truncation` drops turns"), ADVISORY] = None
    image: Annotated[Any, neutral()] = None
    moderation: Annotated[Any, neutral()] = None
    prompt: Annotated[Any, neutral()] = None

    @property
    def session(self) -> str:
        """The session, whose requests go to one worker; empty when the body names none."""
        return self.session_id or self.prompt_cache_key or self.user or self.safety_identifier or ""

    @property
    def conversation_id(self) -> str:
        """The id of its conversation; empty when it has none."""
        given = self.conversation
        return given.id if isinstance(given, ConversationReference) else given or ""

    @property
    def sealed(self) -> bool:
        """Whether reasoning is returned in an opaque form as well."""
        return SEALED in (self.include or ())

    @property
    def logprobs(self) -> bool:
        """Whether logprobs were asked for."""
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
