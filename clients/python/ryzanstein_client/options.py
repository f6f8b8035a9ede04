"""Options of each call that generates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypedDict


class StructuredOutputs(TypedDict, total=False):
    """A constraint on a text: exactly one of json, regex, choice, grammar and json_object."""

    json: Mapping[str, Any] | str  # a JSON Schema
    regex: str  # must match the whole text
    choice: Sequence[str]
    grammar: str  # Lark, or GBNF
    json_object: bool
    whitespace_pattern: str  # a regex of the blanks between JSON tokens
    disable_any_whitespace: bool


class JsonSchema(TypedDict, total=False):
    """A JSON Schema with a name."""

    name: str
    description: str
    schema: Mapping[str, Any]
    strict: bool


class ResponseFormat(TypedDict, total=False):
    """OpenAI's form of structured output: `json_schema` has its schema, the other types have none."""

    type: Required[Literal["text", "json_object", "json_schema"]]
    json_schema: JsonSchema


class Tool(TypedDict, total=False):
    """A function that the model may call."""

    name: Required[str]
    description: str
    parameters: Mapping[str, Any]  # a JSON Schema of the arguments
    strict: bool


class GenerationOptions(TypedDict, total=False):
    """Of every generation. What is left out is the settings' or the server's default."""

    model: str | None
    timeout_s: float | None  # the whole call, its retries and its stream included
    max_tokens: int
    temperature: float  # 0 is greedy
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    seed: int
    logprobs: int  # how many likeliest tokens are reported with each token; 0: only the token itself
    session_id: str  # calls of a session go to one worker, which has their prefix in its cache
    priority: int  # lower runs first
    response_format: ResponseFormat


class _TextOptions(GenerationOptions, total=False):
    """Of completions and chats."""

    min_tokens: int
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    structured_outputs: StructuredOutputs  # in place of response_format
    prediction: str  # the expected text; it changes speed alone


class _ConversationOptions(TypedDict, total=False):
    """Of chats and responses."""

    tools: Sequence[Tool]
    tool_choice: str  # auto, none, required, or the name of a tool
    parallel_tool_calls: bool
    reasoning_effort: str
    chat_template_kwargs: Mapping[str, Any]


class CompletionOptions(_TextOptions, total=False):
    """Of completions."""

    echo: bool  # text and logprobs begin with the prompt's (its first token has none); not over WebSocket
    add_special_tokens: bool


class ChatOptions(_TextOptions, _ConversationOptions, total=False):
    """Of chats."""

    add_generation_prompt: bool
    continue_final_message: bool  # needs add_generation_prompt to be false


class ResponseOptions(GenerationOptions, _ConversationOptions, total=False):
    """Of responses."""

    instructions: str | None  # before everything else; the next turn does not have them
    previous_response_id: str | None  # a kept response to go on from
    store: bool | None  # True: keep, or fail; left out: keep if possible
    truncation: Literal["auto", "disabled"]  # auto drops the oldest turns where the conversation is too long
    metadata: Mapping[str, str]
