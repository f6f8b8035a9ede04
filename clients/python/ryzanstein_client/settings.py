"""What a client is told once, and what each call may choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Literal, Required, TypedDict

from ryzanstein_client.results import ToolCall
from ryzanstein_client.retries import RetryPolicy


class StructuredOutputs(TypedDict, total=False):
    """What a text must follow: exactly one of json, regex, choice, grammar and json_object."""

    json: Mapping[str, Any] | str  # a JSON Schema
    regex: str  # of the whole text
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


class Options(TypedDict, total=False):
    """How a text is generated. What is left out is the server's default."""

    max_tokens: int
    min_tokens: int
    temperature: float  # 0 is greedy
    top_p: float
    top_k: int
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    stop: str | Sequence[str]
    include_stop_str_in_output: bool
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    skip_special_tokens: bool
    logprobs: int  # how many likeliest tokens are reported beside each token; 0: only the token itself
    session_id: str  # calls of a session go to one worker, which has their prefix in its cache
    priority: int  # lower runs first
    structured_outputs: StructuredOutputs
    response_format: ResponseFormat  # in place of structured_outputs
    # Of completions:
    echo: bool  # text and logprobs begin with the prompt's (its first token has none); not over WebSocket
    add_special_tokens: bool
    # Of chats:
    tools: Sequence[Tool]
    tool_choice: str  # auto, none, required, or the name of a tool
    parallel_tool_calls: bool
    reasoning_effort: str
    chat_template_kwargs: Mapping[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool  # needs add_generation_prompt to be false


CHAT_ONLY = frozenset(
    {
        "tools", "tool_choice", "parallel_tool_calls", "reasoning_effort", "chat_template_kwargs",
        "add_generation_prompt", "continue_final_message",
    }
)  # fmt: skip
TEXT_ONLY = frozenset({"echo", "add_special_tokens"})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str = ""  # that a tool's message answers
    name: str = ""
    reasoning: str = ""  # of the assistant, for chat templates that show it again


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's settings; the same for all transports."""

    api_key: str = ""
    model: str = ""  # of calls that name none; may stay empty where one model is served
    session_id: str = ""  # of calls that name none
    timeout_s: float = 600.0  # of calls that name none: the whole call, its retries and its stream included
    connect_timeout_s: float = 5.0
    max_connections: int = 100  # kept in the pool; more calls wait for a free one (REST only)
    use_proxies: bool = True  # of the environment: HTTPS_PROXY and its kin
    tls: SSLContext | None = None  # of https and wss; None: the usual authorities (gRPC takes credentials instead)
    retries: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "max_connections"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def text_options(self, options: Options) -> Options:
        """A completion's options with the settings' session; raises TypeError for one it does not have."""
        if wrong := sorted(options.keys() & CHAT_ONLY):
            raise TypeError(f"only chats have {', '.join(wrong)}")
        return self._complete_options(options)

    def chat_options(self, options: Options) -> Options:
        """A chat's options with the settings' session; raises TypeError for one it does not have."""
        if wrong := sorted(options.keys() & TEXT_ONLY):
            raise TypeError(f"only completions have {', '.join(wrong)}")
        return self._complete_options(options)

    def _complete_options(self, options: Options) -> Options:
        if unknown := sorted(options.keys() - Options.__annotations__.keys()):
            known = ", ".join(sorted(Options.__annotations__))
            raise TypeError(f"unknown option {', '.join(unknown)}; known options: {known}")
        defaults: Options = {"session_id": self.session_id} if self.session_id else {}
        return defaults | options
