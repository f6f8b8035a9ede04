"""Answers by external OpenAI-compatible APIs, the last fallbacks of routes: bodies go there, answers come back."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec

from services.gateway.errors import ApiError, invalid
from services.gateway.generation.admitted import AdmittedRequest
from services.gateway.generation.models import ChainLink, HandedOutError
from services.gateway.generation.prepared import GeneratingBody
from services.gateway.http.exchange import DONE, Exchange
from services.gateway.usage import Usage

_CONNECT_S = 5.0
_FAILED = "external_failed"
_EVENT = "data: "
_OURS = {"attention", "keep_alive", "priority"}  # fields of bodies that other servers do not have


class ExternalClient:
    """Connections to external APIs. Redirects are not followed: only configured hosts get a request."""

    def __init__(self) -> None:
        self.http = httpx.AsyncClient(trust_env=False, follow_redirects=False)

    async def aclose(self) -> None:
        """Close all connections."""
        await self.http.aclose()


@dataclass(frozen=True, slots=True)
class OutsideAnswer:
    """Answers the requests of one path."""

    client: ExternalClient
    path: str  # behind the base URL

    async def answer(
        self, exchange: Exchange, body: GeneratingBody, request: AdmittedRequest, handed: HandedOutError
    ) -> None:
        """Answer by the first external model that does; raises :class:`ApiError`."""
        for link in handed.links:
            exchange.model = link.model
            request.hand_out(link.model)
            exchange.answer_headers = request.headers()
            try:
                await self._relay(exchange, _sent(body), request, link)
                return
            except ApiError as error:
                if error.code != _FAILED or exchange.answering or link is handed.links[-1]:
                    raise

    async def _relay(
        self, exchange: Exchange, fields: dict[str, Any], request: AdmittedRequest, link: ChainLink
    ) -> None:
        external = link.external
        assert external is not None
        try:
            headers = {**external.headers(), "content-type": "application/json"}
        except (OSError, KeyError) as error:
            raise _failed(link, f"its key cannot be read: {error}") from error
        wants_usage = bool((fields.get("stream_options") or {}).get("include_usage"))
        fields = {name: value for name, value in fields.items() if name not in _OURS} | {"model": link.model}
        if fields.get("stream"):
            fields["stream_options"] = {"include_usage": True}
        timeout = httpx.Timeout(external.timeout_s, connect=_CONNECT_S)
        url = external.base_url.rstrip("/") + self.path
        try:
            async with self.client.http.stream(
                "POST", url, content=msgspec.json.encode(fields), headers=headers, timeout=timeout
            ) as answer:
                if answer.status_code != httpx.codes.OK:
                    raise _refusal(link, answer.status_code, await answer.aread())
                request.begin_outside()
                if fields.get("stream"):
                    await _stream(exchange, request, link, answer.aiter_lines(), wants_usage=wants_usage)
                else:
                    whole = _decoded(link, await answer.aread())
                    await request.count_outside(_usage(whole))
                    await exchange.send_json(200, whole)
        except httpx.HTTPError as error:
            raise _failed(link, f"{type(error).__name__} {error}".strip()) from error


async def _stream(
    exchange: Exchange, request: AdmittedRequest, link: ChainLink, lines: AsyncIterator[str], *, wants_usage: bool
) -> None:
    """Pass the events of a stream on; raises :class:`ApiError` when it breaks off."""
    async for line in lines:
        data = line.removeprefix(_EVENT).strip()
        if not line.startswith(_EVENT):
            continue
        if data == "[DONE]":
            await exchange.send_events(DONE, last=True)
            return
        event = _decoded(link, data.encode())
        if event.get("usage"):
            await request.count_outside(_usage(event))
        if not event.get("choices") and event.get("usage") and not wants_usage:
            continue
        if not exchange.status:
            await exchange.start_events()
        exchange.answering = True
        await exchange.send_events(_EVENT.encode() + msgspec.json.encode(event) + b"\n\n")
    raise _failed(link, "its stream ended before its answer")


def _sent(value: Any) -> Any:
    """A body as a client sent it: without the fields that it did not set."""
    if isinstance(value, msgspec.Struct):
        names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
        return {sent: _sent(field) for sent, name in names if (field := getattr(value, name)) is not None}
    return [_sent(item) for item in value] if isinstance(value, (list, tuple)) else value


def _decoded(link: ChainLink, data: bytes) -> dict[str, Any]:
    """An answer or an event, under the name that the route gives the model."""
    try:
        decoded = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise _failed(link, f"it sent no JSON: {error}") from error
    return decoded | {"model": link.model} if "error" not in decoded else decoded


def _usage(answer: dict[str, Any]) -> Usage:
    usage = answer.get("usage") or {}
    return Usage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0))


def _refusal(link: ChainLink, status: int, body: bytes) -> ApiError:
    """The error for a refused request: 400 where the request is wrong, else 502; nothing of the key is in it."""
    try:
        message = str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        message = f"status {status}"
    if status in (400, 413, 422):
        return invalid(f"The external model `{link.model}` refuses the request: {message}", code="external_refused")
    return _failed(link, message)


def _failed(link: ChainLink, reason: str) -> ApiError:
    return ApiError(502, f"The external model `{link.model}` failed: {reason}", "server_error", code=_FAILED)
