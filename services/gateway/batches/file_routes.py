"""/v1/files: the input and result files of batches and fine-tuning jobs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import FastAPI, Query, Response
from fastapi.responses import StreamingResponse

from services.gateway.batches.files import FileGoneError, FileStore, Upload, no_file
from services.gateway.batches.objects import Batch, File, Purpose
from services.gateway.errors import invalid, storage_away
from services.gateway.generation.entrance import Entrance
from services.gateway.http.exchange import Exchange
from services.gateway.http.identified import CallingTenant
from services.gateway.http.multipart import FormReader, read_form
from services.gateway.tenants.redis_guard import RedisAwayError

_FORM_BYTES = 64 * 1024  # for all fields except the file
_ANCHOR, _SECONDS = "expires_after[anchor]", "expires_after[seconds]"
_FIELDS = ("file", "purpose", _ANCHOR, _SECONDS)
_MOST_LISTED = 10_000  # OpenAI's limit
_JSON = "application/json"


class UploadEndpoint:
    """POST /v1/files."""

    def __init__(self, store: FileStore, entrance: Entrance, patience_s: float) -> None:
        self._store = store
        self._entrance = entrance
        self._patience_s = patience_s

    async def serve(self, exchange: Exchange) -> None:
        """See :class:`Endpoint`."""
        tenant = await self._entrance.gate.identify(exchange.authorization)
        async with self._entrance.admit(tenant) as request:
            try:
                file = await self._store_file(exchange, self._store.begin(tenant.name))
            except RedisAwayError as error:
                raise storage_away() from error
            await exchange.send_json(200, file, list(request.admission.headers))

    async def _store_file(self, exchange: Exchange, upload: Upload) -> File:
        form, published = FormReader("file"), False
        most = self._store.limits.file + _FORM_BYTES
        pieces = read_form(exchange, form, max_bytes=most, patience_s=self._patience_s)
        try:
            async for piece in pieces:
                await upload.write(piece)
            purpose = _purpose(form.fields)
            life_s = _life(form.fields, self._store.limits.life_s)
            if form.filename is None:
                raise invalid("Missing required field `file`.", "file", "missing_field")
            file = await upload.publish(form.filename, life_s, purpose)
            published = True
        finally:
            if not published:
                await _abort(upload)
        return file


async def _abort(upload: Upload) -> None:
    try:
        await upload.abort()
    except RedisAwayError:
        return  # the sweep removes expired uploads


def _purpose(fields: dict[str, str]) -> Purpose:
    """The purpose that a form gives a file. Raises :class:`ApiError` (400), also for fields that no form has."""
    for name in fields:
        if name not in _FIELDS:
            raise invalid(f"Unknown field `{name}`. Known fields: {', '.join(_FIELDS)}.", name, "unknown_field")
    match fields.get("purpose"):
        case "batch":
            return "batch"
        case "fine-tune":
            return "fine-tune"
        case None:
            raise invalid("Missing required field `purpose`.", "purpose", "missing_field")
    raise invalid("`purpose` must be `batch` or `fine-tune`.", "purpose", "invalid_value")


def _life(fields: dict[str, str], most_s: int) -> int | None:
    """The file's life in seconds that a form asks for. Raises :class:`ApiError` (400)."""
    if fields.get(_ANCHOR, "created_at") != "created_at":
        raise invalid(f"`{_ANCHOR}` must be `created_at`.", _ANCHOR)
    seconds = fields.get(_SECONDS)
    if seconds is None:
        return None
    if not (seconds.isascii() and seconds.isdigit() and len(seconds) < 12 and int(seconds) >= 1):
        raise invalid(
            f"`{_SECONDS}` must be a number of seconds, at least 1; files are kept for {most_s} at most.", _SECONDS
        )
    return int(seconds)


def add_files(app: FastAPI, store: FileStore) -> None:
    """Add all routes except the upload."""

    @app.get("/v1/files", summary="Your files, the latest first", tags=["batches"])
    async def files(
        tenant: CallingTenant,
        after: Annotated[str, Query(max_length=64, description="An id: only files behind it in the order")] = "",
        limit: Annotated[int, Query(ge=1, le=_MOST_LISTED)] = _MOST_LISTED,
        order: Literal["asc", "desc"] = "desc",
        purpose: Purpose | None = None,
    ) -> Response:
        chosen = [file for file in await store.list(tenant.name) if purpose in (None, file.purpose)]
        chosen = _behind(chosen, after, order)
        return listed(chosen[:limit], more=len(chosen) > limit)

    @app.get("/v1/files/{file_id}", summary="One file", tags=["batches"])
    async def file(file_id: str, tenant: CallingTenant) -> Response:
        return as_json(await store.get(tenant.name, file_id))

    @app.get(
        "/v1/files/{file_id}/content",
        summary="A file's content",
        tags=["batches"],
        response_class=Response,
        responses={200: {"content": {"application/octet-stream": {}}}},
    )
    async def content(file_id: str, tenant: CallingTenant) -> Response:
        file = await store.get(tenant.name, file_id)
        headers = {"content-length": str(file.bytes)}
        pieces = await _begun(store.pieces(tenant.name, file_id, file.bytes), file_id)
        return StreamingResponse(pieces, media_type="application/octet-stream", headers=headers)

    @app.delete(
        "/v1/files/{file_id}", summary="Remove a file; a batch or fine-tuning job that reads it fails", tags=["batches"]
    )
    async def delete(file_id: str, tenant: CallingTenant) -> Response:
        await store.get(tenant.name, file_id)
        await store.delete(tenant.name, file_id)
        return as_json({"id": file_id, "object": "file", "deleted": True})


def _behind(files: list[File], after: str, order: Literal["asc", "desc"]) -> list[File]:
    """Sort `files`, which come oldest first, and leave out those up to the id `after`."""
    if order == "asc":
        return [file for file in files if file.id > after]
    return [file for file in reversed(files) if not after or file.id < after]


async def _begun(pieces: AsyncIterator[bytes], file_id: str) -> AsyncIterator[bytes]:
    """Read the first piece before the answer begins; raises :class:`ApiError` (404) for a missing file."""
    try:
        first = await anext(pieces, b"")
    except FileGoneError:
        raise no_file(file_id) from None

    async def whole() -> AsyncIterator[bytes]:
        yield first
        async for piece in pieces:
            yield piece

    return whole()


def as_json(value: object) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), media_type=_JSON)


def listed(objects: Sequence[File | Batch], *, more: bool) -> Response:
    """A page of a list."""
    ids = [one.id for one in objects]
    page = {"object": "list", "data": objects, "has_more": more}
    return as_json(page | {"first_id": ids[0] if ids else None, "last_id": ids[-1] if ids else None})
