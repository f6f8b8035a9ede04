"""Files and batches over REST."""

from __future__ import annotations

from collections.abc import Mapping

import httpx
import msgspec
from msgspec import Struct, field

from ryzanstein_client.rest import wire
from ryzanstein_client.rest.answers import item_usage, read_deleted, reader_of
from ryzanstein_client.rest.requests import Request, delete, get, get_page, path_of
from ryzanstein_client.results import Batch, BatchError, File, Page


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
    created_at: int
    expires_at: int
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: _Errors | None = None
    usage: wire.ItemUsage | None = None


class _Files(Struct):
    data: list[_File]
    has_more: bool = False
    last_id: str | None = None


class _Batches(Struct):
    data: list[_Batch]
    has_more: bool = False
    last_id: str | None = None


def upload(content: bytes, filename: str, expires_after_s: int | None) -> Request[File]:
    """POST /v1/files. A second one would be a second file, so it is not repeated."""
    fields = {"purpose": "batch"}
    if expires_after_s is not None:
        fields |= {"expires_after[anchor]": "created_at", "expires_after[seconds]": str(expires_after_s)}
    encoded = httpx.Request("POST", "http://form", data=fields, files={"file": (filename, content)})  # for its body
    kind = encoded.headers["content-type"]
    return Request("POST", "/v1/files", encoded.read(), read_file, content_type=kind, repeatable=False)


def files(after: str | None, limit: int | None, purpose: str | None) -> Request[Page[File]]:
    """GET /v1/files."""
    return get_page("/v1/files", {"after": after, "limit": limit, "purpose": purpose}, read_files)


def file(file_id: str) -> Request[File]:
    """GET /v1/files/{id}."""
    return get(path_of("/v1/files", file_id), read_file)


def download(file_id: str) -> Request[bytes]:
    """GET /v1/files/{id}/content."""
    return get(f"{path_of('/v1/files', file_id)}/content", bytes)


def delete_file(file_id: str) -> Request[bool]:
    """DELETE /v1/files/{id}."""
    return delete(path_of("/v1/files", file_id), read_deleted)


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


def batches(after: str | None, limit: int | None) -> Request[Page[Batch]]:
    """GET /v1/batches."""
    return get_page("/v1/batches", {"after": after, "limit": limit}, read_batches)


def cancel(batch_id: str) -> Request[Batch]:
    """POST /v1/batches/{id}/cancel."""
    return Request("POST", f"{path_of('/v1/batches', batch_id)}/cancel", b"", read_batch)


def read_file(data: bytes) -> File:
    """A file."""
    return _file_of(_file(data))


def read_files(data: bytes) -> Page[File]:
    """A page of files."""
    sent = _files(data)
    return Page(tuple(map(_file_of, sent.data)), sent.last_id if sent.has_more else None)


def read_batch(data: bytes) -> Batch:
    """A batch."""
    return _batch_of(_batch(data))


def read_batches(data: bytes) -> Page[Batch]:
    """A page of batches."""
    sent = _batches(data)
    return Page(tuple(map(_batch_of, sent.data)), sent.last_id if sent.has_more else None)


def _file_of(sent: _File) -> File:
    return File(sent.id, sent.filename, sent.purpose, sent.bytes, sent.created_at, sent.expires_at)


def _batch_of(sent: _Batch) -> Batch:
    counts = sent.request_counts
    return Batch(
        id=sent.id,
        status=sent.status,
        endpoint=sent.endpoint,
        input_file_id=sent.input_file_id,
        output_file_id=sent.output_file_id,
        error_file_id=sent.error_file_id,
        total=counts.total,
        completed=counts.completed,
        failed=counts.failed,
        usage=item_usage(sent.usage),
        created=sent.created_at,
        expires=sent.expires_at,
        errors=tuple(BatchError(e.code, e.message, e.line) for e in (sent.errors.data if sent.errors else ())),
    )


_file = reader_of(_File)
_files = reader_of(_Files)
_batch = reader_of(_Batch)
_batches = reader_of(_Batches)
