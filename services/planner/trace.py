"""Requests to replay: from the gateways' log, or from files in the published formats of Mooncake and Azure."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from services.common.request_log import LOG_BLOCK_TOKENS, LoggedRequest

MOONCAKE_BLOCK_TOKENS = 512


class TraceError(Exception):
    """A file is no trace; the message names the file, the line and the field."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request as it arrived. `blocks` name its prompt's prefix: equal hashes mean equal prefixes."""

    at: float  # seconds since the epoch, or since the trace began
    prompt_tokens: int
    answer_tokens: int
    blocks: tuple[int, ...] = ()
    block_tokens: int = LOG_BLOCK_TOKENS
    tenant: str = ""
    session: str = ""

    def moved(self, at: float) -> TraceRequest:
        """The same request at another time."""
        return replace(self, at=at)

    @classmethod
    def of(cls, logged: LoggedRequest) -> TraceRequest:
        """A request of the gateways' log."""
        return cls(
            logged.at, logged.prompt_tokens, max(1, logged.answer_tokens), logged.blocks, LOG_BLOCK_TOKENS,
            logged.tenant, logged.session,
        )  # fmt: skip


def read_trace(path: Path) -> list[TraceRequest]:
    """Read a file, by its first line: Mooncake's JSON lines or Azure's CSV; sorted by time. Raises TraceError."""
    try:
        with path.open(newline="") as lines:
            first = lines.readline()
            lines.seek(0)
            read = _mooncake if first.lstrip().startswith("{") else _azure
            requests = sorted(read(path, lines), key=lambda request: request.at)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: {error}") from error
    if not requests:
        raise TraceError(f"{path}: no requests")
    return requests


def _mooncake(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Lines of {"timestamp": milliseconds, "input_length", "output_length", "hash_ids": one for 512 tokens}."""

    def read(row: dict[str, Any]) -> TraceRequest:
        blocks = tuple(int(block) for block in row.get("hash_ids", ()))
        tokens, answer = int(row["input_length"]), int(row["output_length"])
        return _checked(TraceRequest(float(row["timestamp"]) / 1e3, tokens, answer, blocks, MOONCAKE_BLOCK_TOKENS))

    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield _located(path, number, lambda line=line: read(json.loads(line)))  # type: ignore[misc]


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TraceRequest]:
    """Rows of TIMESTAMP, ContextTokens, GeneratedTokens."""

    def read(row: dict[str, str]) -> TraceRequest:
        at = datetime.fromisoformat(row["TIMESTAMP"].strip()).timestamp()
        return _checked(TraceRequest(at, int(row["ContextTokens"]), int(row["GeneratedTokens"])))

    for number, row in enumerate(csv.DictReader(lines), start=2):
        yield _located(path, number, lambda row=row: read(row))  # type: ignore[misc]


def _checked(request: TraceRequest) -> TraceRequest:
    if request.prompt_tokens < 1 or request.answer_tokens < 1:
        raise ValueError("a request has at least one token of prompt and one of answer")
    return request


def _located(path: Path, number: int, read: Callable[[], TraceRequest]) -> TraceRequest:
    try:
        return read()
    except KeyError as error:
        fields = "timestamp, input_length, output_length, hash_ids, or TIMESTAMP, ContextTokens, GeneratedTokens"
        raise TraceError(f"{path}, line {number}: no field {error}; a line has {fields}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise TraceError(f"{path}, line {number}: {error}") from error
