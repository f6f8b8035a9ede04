"""Settings of a client, and the parts of a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ssl import SSLContext
from typing import Any, Literal

from ryzanstein_client.options import GenerationOptions
from ryzanstein_client.results import ToolCall
from ryzanstein_client.retries import RetryPolicy

Prompt = str | Sequence[int]  # a text or token ids


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()  # only in messages of the assistant
    tool_call_id: str = ""  # that a tool's message answers
    name: str = ""
    reasoning: str = ""  # only in messages of the assistant, for chat templates that show it again


@dataclass(frozen=True, slots=True)
class Settings:
    """A client's settings; the same for all transports."""

    api_key: str = ""
    model: str = ""  # default of calls that name none; may stay empty where one model is served
    session_id: str = ""  # default of calls that name none
    timeout_s: float = 600.0  # default of calls that name none: the whole call, its retries and its stream included
    connect_timeout_s: float = 5.0
    max_connections: int = 100  # kept in the pool; more calls wait for a free one (REST only)
    use_proxies: bool = True  # those of the environment: HTTPS_PROXY and its kin
    tls: SSLContext | None = None  # for https and wss; None: the usual authorities (gRPC takes credentials instead)
    retries: RetryPolicy = field(default_factory=RetryPolicy)

    def __post_init__(self) -> None:
        for name in ("timeout_s", "connect_timeout_s", "max_connections"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")

    def model_of(self, model: str | None) -> str:
        """The model of a call that may name none; empty where the settings name none either."""
        return self.model if model is None else model

    def generation_fields(self, options: Mapping[str, object], kind: type[GenerationOptions]) -> dict[str, Any]:
        """A generation's options with the settings' model and session; raises TypeError for one it does not have."""
        if wrong := sorted(options.keys() - kind.__annotations__.keys()):
            known = ", ".join(sorted(kind.__annotations__))
            raise TypeError(f"{kind.__name__} has no {', '.join(wrong)}; known options: {known}")
        chosen = {name: value for name, value in options.items() if value is not None and name != "timeout_s"}
        fields = {"model": self.model, "session_id": self.session_id, **chosen}
        return {name: value for name, value in fields.items() if value != "" or name not in ("model", "session_id")}
