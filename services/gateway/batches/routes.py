"""/v1/batches: a file of requests, answered when workers have room."""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable
from typing import Annotated

from fastapi import FastAPI, Query, Response

from services.gateway.api.decode import BodyDecoder
from services.gateway.api.schema import BatchBody
from services.gateway.batches.file_routes import as_json, listed
from services.gateway.batches.objects import Plan, new_object_id
from services.gateway.batches.store import BatchStore
from services.gateway.errors import invalid, storage_away
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.http.documentation import Documentation
from services.gateway.http.exchange import Exchange
from services.gateway.http.identified import CallingTenant
from services.gateway.tenants.redis_guard import RedisAwayError

_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
PATH = "/v1/batches"
DOCUMENTED = Documentation(
    summary="Answer all requests of a file when there is room for them",
    tag="batches",
    body=BatchBody,
    example={"input_file_id": "file-0d6f8f2c9b1e4a57", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    answer={
        "id": "batch_0d6f8f2c9b1e4a57",
        "object": "batch",
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-0d6f8f2c9b1e4a57",
        "completion_window": "24h",
        "status": "validating",
        "created_at": 1767225600,
        "expires_at": 1767312000,
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
    },
)


def window_s(text: str, most_s: int) -> int:
    """A completion window in seconds; raises :class:`ApiError` (400)."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS_S[match[2]] if match else 0
    if not 0 < seconds <= most_s:
        message = f"`completion_window` must be like `24h`: a number and s, m, h or d, at most {most_s} s."
        raise invalid(message, "completion_window")
    return seconds


class BatchHandler:
    """POST /v1/batches."""

    def __init__(
        self, store: BatchStore, credential: Callable[[str], Awaitable[str]], on_new: Callable[[], None]
    ) -> None:
        """`credential` derives what is stored from an Authorization header; `on_new` is called for each new batch."""
        self._store = store
        self._credential = credential
        self._on_new = on_new
        self.decode = BodyDecoder(BatchBody).decode

    async def answer(self, exchange: Exchange, body: BatchBody, request: AdmittedRequest) -> None:
        """See :class:`Handler`."""
        tenant = request.tenant.name
        try:
            plan = await self._plan(tenant, body, exchange.authorization)
            batch = await self._store.create(tenant, plan)
        except RedisAwayError as error:
            raise storage_away() from error
        self._on_new()
        await exchange.send_json(200, batch, list(request.admission.headers))

    async def _plan(self, tenant: str, body: BatchBody, authorization: str) -> Plan:
        files, now = self._store.files, int(time.time())
        expires_at = now + window_s(body.completion_window, files.limits.life_s)
        file = await files.get(tenant, body.input_file_id)
        if file.purpose != "batch":
            raise invalid(f"The file {file.id} has the purpose `{file.purpose}`; `batch` is needed.", "input_file_id")
        if file.expires_at < expires_at:
            message = "The file's life is over before the window: upload it again, or choose a shorter one."
            raise invalid(message, "completion_window")
        return Plan(
            endpoint=body.endpoint,
            input_file_id=file.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=expires_at,
            metadata=body.metadata,
            credential=await self._credential(authorization),
            output_file_id=new_object_id("file-"),
            error_file_id=new_object_id("file-"),
        )


def add_batches(app: FastAPI, store: BatchStore, on_cancel: Callable[[], None]) -> None:
    """Add all routes except the creation of a batch."""

    @app.get(PATH, summary="Your batches, the latest first", tags=["batches"])
    async def batches(
        tenant: CallingTenant,
        after: Annotated[str, Query(max_length=64, description="An id: only batches made before it")] = "",
        limit: Annotated[int, Query(ge=1, le=100)] = 20,
    ) -> Response:
        page, more = await store.list(tenant.name, after, limit)
        return listed(page, more=more)

    @app.get(PATH + "/{batch_id}", summary="One batch", tags=["batches"])
    async def batch(batch_id: str, tenant: CallingTenant) -> Response:
        return as_json(await store.get(tenant.name, batch_id))

    @app.post(PATH + "/{batch_id}/cancel", summary="End a batch; what has been answered is kept", tags=["batches"])
    async def cancel(batch_id: str, tenant: CallingTenant) -> Response:
        batch = await store.cancel(tenant.name, batch_id)
        on_cancel()
        return as_json(batch)
