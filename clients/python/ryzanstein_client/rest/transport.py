"""httpx's part of both clients: its settings and its errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from ryzanstein_client.errors import TimedOut, unreachable
from ryzanstein_client.rest.answers import error_of_answer
from ryzanstein_client.rest.requests import check_url, headers
from ryzanstein_client.settings import Settings


def client_options(base_url: str, settings: Settings) -> dict[str, Any]:
    """Arguments of httpx's clients; raises ValueError for a URL that is none."""
    most = settings.max_connections
    return {
        "base_url": check_url(base_url, ("http", "https")),
        "trust_env": settings.use_proxies,
        "verify": True if settings.tls is None else settings.tls,
        "headers": headers(settings),
        "limits": httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=60),
    }


def timeout(settings: Settings, left_s: float) -> httpx.Timeout:
    """Time-outs of an attempt that may take `left_s` seconds."""
    return httpx.Timeout(left_s, connect=min(left_s, settings.connect_timeout_s))


@contextmanager
def httpx_errors() -> Iterator[None]:
    """Turn httpx's errors into this package's."""
    try:
        yield
    except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout) as error:
        raise TimedOut(f"no answer in time ({type(error).__name__})") from error
    except (httpx.TransportError, httpx.StreamError) as error:
        raise unreachable(f"the connection failed: {error or type(error).__name__}") from error


def check(response: httpx.Response) -> None:
    """Raise the error of an answer, whose body has been read, that is not a success."""
    if not response.is_success:
        raise error_of_answer(response.status_code, response.headers, response.content)
