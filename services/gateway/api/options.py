"""Values in the bodies of all APIs: the options of a text, and the functions that a model may call."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from services.common.patterns import END
from services.gateway.api.fields import ADVISORY

TokenId = Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
MAX_SESSION_CHARS = 512
Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARS)]
NonEmpty = Annotated[str, Meta(min_length=1)]
ChosenModel = Annotated[str, Meta(description="A model of /v1/models; may be left out when there is only one")]
Priority = Annotated[int, Meta(ge=-100, le=100, description="Lower runs first; tenants may limit it")]
Labels = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)]
FunctionName = Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,128}" + END)]
KeepAlive = Annotated[
    str | Annotated[float, Meta(ge=-1e9, le=1e9)],
    Meta(
        description="How long the model stays awake after the request: seconds, or a duration such as `5m`; 0: it may "
        "sleep at once, negative: idleness is no reason to sleep"
    ),
]
AttentionName = Annotated[
    str,
    Meta(
        description="How generated tokens attend: `dense`, `window(sinks, window)` with tokens at the beginning and "
        "at the end, or `top_k(pages)` with KV blocks that each one chooses; default: as the model's workers are set"
    ),
]
MAX_TOOLS = 4096


class TextPart(Struct, tag_field="type", tag="text", forbid_unknown_fields=True):
    """A part of a message."""

    text: Annotated[str | None, Meta(description="null: empty")]
    cache_control: Annotated[Any, ADVISORY] = None


class PredictedPart(Struct, forbid_unknown_fields=True):
    """A part of an expected answer."""

    type: Literal["text"]  # a tag would be optional, where there is no other part
    text: str


class PredictedContent(Struct, forbid_unknown_fields=True):
    """An expected answer: where the model writes the same tokens, several of them take one step."""

    type: Literal["content"]
    content: str | list[PredictedPart]

    @property
    def text(self) -> str:
        """All of it."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class FunctionDefinition(Struct, kw_only=True, forbid_unknown_fields=True):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(description="A JSON Schema of the arguments")] = None
    strict: Annotated[bool | None, Meta(description="Calls follow the schema whatever the model would write")] = None


class ReasoningOptions(Struct, kw_only=True, forbid_unknown_fields=True):
    """How the model reasons, in the form of OpenRouter's clients."""

    effort: Annotated[str, Meta(description="`reasoning_effort`, where that is missing")] | None = None
    enabled: Annotated[bool, Meta(description="The variable `enable_thinking` of the chat template")] | None = None
    max_tokens: Annotated[Any, ADVISORY] = None
    exclude: Annotated[Any, ADVISORY] = None
    summary: Annotated[Any, ADVISORY] = None


class ThinkingSwitch(Struct, kw_only=True, forbid_unknown_fields=True):
    """Whether the model thinks, in the form of DeepSeek's and GLM's clients."""

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Annotated[Any, ADVISORY] = None
    clear_thinking: Annotated[Any, ADVISORY] = None


class JsonSchemaFormat(Struct, forbid_unknown_fields=True):
    """A named JSON Schema. Output follows it whether or not `strict` is set."""

    exact_without: ClassVar[str] = "schema"  # a schema in its place is not left out as so many unknown fields

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class TagStructure(Struct, forbid_unknown_fields=True):
    """A JSON text by a schema, between two marks."""

    begin: NonEmpty
    schema: dict[str, Any] | bool
    end: str


class ResponseFormat(Struct, kw_only=True, forbid_unknown_fields=True):
    """Plain text, any JSON object, JSON that follows a schema, a regex, or free text with tagged structures."""

    type: Literal["text", "json_object", "json_schema", "json", "regex", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    value: (
        Annotated[
            dict[str, Any] | bool | str,
            Meta(description="The schema, or the regex, as text-generation-inference takes it"),
        ]
        | None
    ) = None
    schema: (
        Annotated[dict[str, Any] | bool, Meta(description="A JSON Schema, without `json_schema` around it")] | None
    ) = None
    strict: bool | None = None
    name: Annotated[Any, ADVISORY] = None
    structures: Annotated[list[TagStructure], Meta(max_length=128, description="Of structural_tag")] | None = None
    triggers: Annotated[list[NonEmpty], Meta(max_length=128, description="Beginnings of `begin`")] | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text: exactly one of json, regex, choice, grammar, json_object and structural_tag."""

    json: Annotated[dict[str, Any] | bool | str | None, Meta(description="A JSON Schema, or its text")] = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=1024)] | None = None
    grammar: Annotated[str, Meta(description="Lark, or GBNF (`root ::= ...`)")] | None = None
    json_object: bool | None = None
    structural_tag: Annotated[str, Meta(description="The JSON of a response_format structural_tag")] | None = None
    disable_additional_properties: (
        Annotated[bool, Meta(description="Objects of `json` that do not say it themselves are closed")] | None
    ) = None
    whitespace_pattern: Annotated[str, Meta(description="Regex of the blanks between JSON tokens")] | None = None
    disable_any_whitespace: bool | None = None


class TextOptions(Struct, kw_only=True):
    """The sampling of a text and its required form. In every field null means the default."""

    temperature: Annotated[float, Meta(ge=0, le=100, description="0 is greedy")] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1, description="0 keeps the likeliest token only")] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=0xFFFFFFFF, description="0 and -1 are off")] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10)] | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: NonEmpty | list[NonEmpty] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    ignore_eos: bool | None = None
    attention: AttentionName | None = None
    skip_special_tokens: Annotated[bool, Meta(description="Default true")] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[dict[str, Any] | bool | str, Meta(description="structured_outputs.json")] | None = None
    guided_regex: Annotated[str, Meta(description="structured_outputs.regex")] | None = None
    guided_choice: Annotated[list[str], Meta(max_length=1024, description="structured_outputs.choice")] | None = None
    guided_grammar: Annotated[str, Meta(description="structured_outputs.grammar")] | None = None
    guided_whitespace_pattern: str | None = None
