"""Results of calls. All of them are frozen; every transport returns the same types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens that a call used."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens that were not computed again
    accepted_prediction_tokens: int = 0  # tokens of the completion that were drafted from its prediction
    rejected_prediction_tokens: int = 0  # tokens that were drafted from it and are not in the completion

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
    model: str = ""  # that answered; empty over gRPC where none was named
    reasoning: str = ""  # chats only
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a generation. The last chunk, and no other, has a finish reason and usage."""

    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    token_ids: tuple[int, ...] = ()  # empty over REST
    finish_reason: str | None = None
    usage: Usage | None = None
    request_id: str = ""
    model: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    response: Response | None = None  # the streamed response, with the last chunk


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One vector for each input, in the inputs' order."""

    vectors: tuple[tuple[float, ...], ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Model:
    """A model that requests may name."""

    id: str
    created: int  # Unix seconds
    max_model_len: int  # tokens of prompt and completion together; 0: expected, and not served yet


@dataclass(frozen=True, slots=True)
class Scores:
    """How alike texts are, from -1 to 1, in their order."""

    values: tuple[float, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's place in a ranking."""

    index: int  # among the documents given
    score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, the likest first."""

    results: tuple[Ranked, ...]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Response:
    """A turn of a conversation that the server keeps."""

    id: str  # the next turn's previous_response_id
    text: str
    status: str  # completed, incomplete
    usage: Usage
    stored: bool
    model: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    incomplete_reason: str = ""  # max_output_tokens
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """A part of a list."""

    items: tuple[Item, ...]
    after: str | None  # argument of the call for the next page; None: there is none


@dataclass(frozen=True, slots=True)
class File:
    """A file of requests or answers."""

    id: str
    filename: str
    purpose: str  # batch, batch_output
    size: int  # bytes
    created: int  # Unix seconds
    expires: int


@dataclass(frozen=True, slots=True)
class BatchError:
    """Why a file of requests cannot be run."""

    code: str
    message: str
    line: int | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """A file of requests that is being answered."""

    id: str
    status: str  # validating, in_progress, finalizing, completed, failed, expired, cancelling, cancelled
    endpoint: str
    input_file_id: str
    output_file_id: str | None  # answers, when they are there
    error_file_id: str | None  # requests that were refused
    total: int  # requests
    completed: int
    failed: int
    usage: Usage
    created: int  # Unix seconds
    expires: int
    errors: tuple[BatchError, ...] = ()

    @property
    def over(self) -> bool:
        """Whether nothing more will change."""
        return self.status in ("completed", "failed", "expired", "cancelled")
