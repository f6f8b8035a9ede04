"""What calls return. Everything is frozen; every transport returns the same types."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a call used."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # of the prompt, not computed again

    @property
    def total_tokens(self) -> int:
        """Prompt and completion."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's log probability. REST names tokens by text, gRPC by id; the other one is None."""

    logprob: float
    text: str | None = None
    token_id: int | None = None
    top: tuple[TokenLogprob, ...] = ()  # the likeliest tokens at its position, when asked for


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model calls."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a call: the first one of an index has id and name, all have more of the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation."""

    text: str
    finish_reason: str  # stop, length, tool_calls
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()  # empty over REST
    request_id: str = ""
    model: str = ""  # that answered; empty over gRPC, which does not say
    reasoning: str = ""  # of a chat
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a generation has added. The last chunk, and no other, has a finish reason and usage."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()  # empty over REST
    finish_reason: str | None = None
    usage: Usage | None = None
    request_id: str = ""
    model: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each input, in the inputs' order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served now."""

    id: str
    created: int  # Unix seconds
    max_model_len: int  # tokens of prompt and completion together
