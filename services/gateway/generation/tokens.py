"""The tokens of one sequence as the pipeline passes them on."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from ryzanstein.v1 import worker_pb2


class FinishReason(StrEnum):
    """Why a sequence is complete, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    FUNCTION_CALL = "function_call"


class Takeover(Struct, frozen=True):
    """A worker begins to answer, or continues the answer of a lost worker."""

    worker: str
    attempt: int
    after: str  # why the worker before is none any more; empty at the first one
    resume: str  # when it continues a text: exact or approximate, as the model card says; empty when it begins one

    def json(self) -> dict[str, object]:
        """Return the form that clients get."""
        return {
            "id": self.worker,
            "attempt": self.attempt,
            "after": self.after or None,
            "resume": self.resume or None,
        }


class TokenBatch(Struct):
    """Tokens that are ready together. With `finish` it is the last batch."""

    ids: list[int]
    logprobs: Sequence[worker_pb2.TokenLogprobs] = ()
    finish: FinishReason | None = None
    prompt_logprobs: Sequence[worker_pb2.TokenLogprobs] = ()
    embedding: Sequence[float] = ()
    takeover: Takeover | None = None  # these tokens are its worker's first
    accepted_prediction: int = 0  # how many of these tokens were drafted from the request's prediction
    rejected_prediction: int = 0  # tokens that were drafted from it in the same steps, and not drawn


class TokenSource(Protocol):
    """The source of a sequence's tokens: workers, or the response cache."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in a prefix cache."""

    async def next(self) -> TokenBatch:
        """The next batch; raises :class:`ApiError` when the sequence cannot be completed."""

    def close(self, *, complete: bool = False) -> None:
        """No more is wanted: stop the work, at once. Harmless after the last batch.

        `complete` when the text has ended, so that the outcome is a success and not a cancellation.
        """
