"""Files and batches over REST."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import msgspec
from msgspec import Struct, field

from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import item_usage, reader_of
from ryzanstein_client.rest.requests import Request, get, path_of
from ryzanstein_client.results import Batch, BatchError, File


class _File(Struct):
    id: str
    filename: str
    purpose: str
    bytes: int
    created_at: int
    expires_at: int


class _Error(Struct):
    code: str
    message: str
    line: int | None = None


class _Errors(Struct):
    data: list[_Error] = field(default_factory=list)


class _Counts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class _Batch(Struct):
    id: str
    status: str
    endpoint: str
    input_file_id: str
    request_counts: _Counts
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: _Errors | None = None
    usage: wire.ItemUsage | None = None


class _Deleted(Struct):
    deleted: bool


def upload(content: bytes, filename: str) -> Request[File]:
    """POST /v1/files. A second one would be a second file, so it is not repeated."""
    form = {"data": {"purpose": "batch"}, "files": {"file": (filename, content)}}
    encoded = httpx.Request("POST", "http://form", **form)  # type: ignore[arg-type]  # only its body is sent
    kind = encoded.headers["content-type"]
    return Request("POST", "/v1/files", encoded.read(), read_file, content_type=kind, repeatable=False)


def file(file_id: str) -> Request[File]:
    """GET /v1/files/{id}."""
    return get(path_of("/v1/files", file_id), read_file)


def download(file_id: str) -> Request[bytes]:
    """GET /v1/files/{id}/content."""
    return get(f"{path_of('/v1/files', file_id)}/content", bytes)


def delete_file(file_id: str) -> Request[bool]:
    """DELETE /v1/files/{id}."""
    return Request("DELETE", path_of("/v1/files", file_id), b"", lambda data: _deleted(data).deleted)


def create(
    input_file_id: str, endpoint: str, completion_window: str, metadata: Mapping[str, str] | None
) -> Request[Batch]:
    """POST /v1/batches. A second one would be a second batch, so it is not repeated."""
    body = {"input_file_id": input_file_id, "endpoint": endpoint, "completion_window": completion_window}
    named = body | ({"metadata": dict(metadata)} if metadata else {})
    return Request("POST", "/v1/batches", msgspec.json.encode(named), read_batch, repeatable=False)


def batch(batch_id: str) -> Request[Batch]:
    """GET /v1/batches/{id}."""
    return get(path_of("/v1/batches", batch_id), read_batch)


def cancel(batch_id: str) -> Request[Batch]:
    """POST /v1/batches/{id}/cancel."""
    return Request("POST", f"{path_of('/v1/batches', batch_id)}/cancel", b"", read_batch)


def read_file(data: bytes) -> File:
    """A file."""
    found = _file(data)
    return File(found.id, found.filename, found.purpose, found.bytes, found.created_at, found.expires_at)


def read_batch(data: bytes) -> Batch:
    """A batch."""
    found = _batch(data)
    counts = found.request_counts
    return Batch(
        id=found.id,
        status=found.status,
        endpoint=found.endpoint,
        input_file_id=found.input_file_id,
        output_file_id=found.output_file_id,
        error_file_id=found.error_file_id,
        total=counts.total,
        completed=counts.completed,
        failed=counts.failed,
        usage=item_usage(found.usage),
        errors=tuple(BatchError(e.code, e.message, e.line) for e in (found.errors.data if found.errors else ())),
    )


_file = reader_of(_File)
_batch = reader_of(_Batch)
_deleted = reader_of(_Deleted)
