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
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int  # how many likeliest tokens are reported beside each token; 0: only the token itself
    session_id: str  # calls of a session go to one worker, which has their prefix in its cache
    priority: int  # lower runs first
    structured_outputs: StructuredOutputs
    tools: Sequence[Tool]  # of chats, as the next two
    tool_choice: str  # auto, none, required, or the name of a tool
    parallel_tool_calls: bool


CHAT_ONLY = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # of the assistant
    tool_call_id: str = ""  # that a tool's message answers


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
        """:meth:`complete_options` of a call that is no chat; raises TypeError for those of chats."""
        if wrong := sorted(options.keys() & CHAT_ONLY):
            raise TypeError(f"{', '.join(wrong)}: only chats have tools")
        return self.complete_options(options)

    def complete_options(self, options: Options) -> Options:
        """A call's options with the settings' session; raises TypeError for an unknown one."""
        if unknown := sorted(options.keys() - Options.__annotations__.keys()):
            known = ", ".join(sorted(Options.__annotations__))
            raise TypeError(f"unknown option {', '.join(unknown)}; known options: {known}")
        defaults: Options = {"session_id": self.session_id} if self.session_id else {}
        return defaults | options
