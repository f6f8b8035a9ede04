"""gRPC's part of both clients: channels' options, metadata and errors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import grpc
import grpc.aio

from ryzanstein_client.errors import (
    ApiError,
    BadRequest,
    ErrorFields,
    Forbidden,
    NotFound,
    RateLimited,
    RyzansteinError,
    ServerError,
    TimedOut,
    Unauthorized,
    Unavailable,
)
from ryzanstein_client.settings import Settings

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # the servers' own limit


def channel_options(settings: Settings) -> tuple[tuple[str, int], ...]:
    """Options of a channel."""
    return (
        ("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        # A retry must find a restarted gateway: gRPC itself would wait a second and more before it connects again.
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.min_reconnect_backoff_ms", round(settings.connect_timeout_s * 1000)),  # also the time to connect
        ("grpc.max_reconnect_backoff_ms", 1_000),
        ("grpc.enable_http_proxy", int(settings.use_proxies)),
        ("grpc.enable_retries", 0),  # retries are this package's, within its budget
    )


def check_address(address: str) -> str:
    """The address; raises ValueError for a URL, which gRPC would take for the name of a host that it can't find."""
    if address.startswith(("http://", "https://", "ws://", "wss://")):
        raise ValueError(f"{address!r} must be host:port, as in {urlsplit(address).netloc!r}; TLS takes credentials")
    return address


_BY_STATUS: dict[grpc.StatusCode, type[ApiError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.UNAUTHENTICATED: Unauthorized,
    grpc.StatusCode.PERMISSION_DENIED: Forbidden,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: RateLimited,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    # The error of a call when its own channel is closed during it.
    grpc.StatusCode.CANCELLED: Unavailable,
}


def metadata(settings: Settings) -> tuple[tuple[str, str], ...]:
    """Metadata of every call."""
    return (("authorization", f"Bearer {settings.api_key}"),) if settings.api_key else ()


def fallback_model(initial: Iterable[tuple[str, str | bytes]]) -> str:
    """The model that answers for a route, or in place of the one asked for; empty where that one does."""
    headers = "x-ryzanstein-fallback-model", "x-ryzanstein-target"
    return next((str(value) for name, value in initial if name in headers), "")


@contextmanager
def grpc_errors() -> Iterator[None]:
    """Turn gRPC's errors into this package's."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _error(error.code(), error.details(), error.trailing_metadata()) from error
    except grpc.RpcError as error:
        if not isinstance(error, grpc.Call):
            raise
        raise _error(error.code(), error.details(), error.trailing_metadata()) from error


def _error(code: grpc.StatusCode, details: str | None, trailing: Sequence[Any] | Any) -> RyzansteinError:
    message = details or code.name
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return TimedOut(message)
    pairs = {name: value for name, value in trailing or () if isinstance(value, str)}
    fields = ErrorFields(message, code.name.lower(), pairs.get("param"), pairs.get("code"))
    retry_after = pairs.get("retry-after", "")
    return _BY_STATUS.get(code, ServerError)(fields, float(retry_after) if retry_after.isdecimal() else None)
