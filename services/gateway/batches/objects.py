"""The objects of OpenAI's files and batches, as clients see them."""

from __future__ import annotations

import random
import time
from typing import Any, Literal

import msgspec

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
Purpose = Literal["batch", "batch_output", "fine-tune", "fine-tune-results"]
Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


def new_object_id(prefix: str) -> str:
    """A random id that cannot be guessed; ids sort by time of creation."""
    return f"{prefix}{time.time_ns() // 1000:014x}{random.SystemRandom().getrandbits(80):020x}"


class File(msgspec.Struct, kw_only=True):
    """A stored file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class BatchError(msgspec.Struct, kw_only=True):
    """An error in an input file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct, kw_only=True):
    """A list of errors."""

    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """How many requests of a batch have ended."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """The part of a batch that never changes."""

    endpoint: Endpoint
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None
    credential: str  # finds the tenant that created the batch; not its key
    output_file_id: str
    error_file_id: str


class Batch(msgspec.Struct, kw_only=True):
    """A batch."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: Status
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


def usage_of(input_tokens: int, cached_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A batch's usage in OpenAI's shape."""
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }
