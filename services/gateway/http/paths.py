"""Suggests the path that a client may have meant by an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from services.gateway.errors import ApiError

_PREFIX = "/v1"
_MOST_CHARS = 200
_SIMILAR = 0.8


def unknown_path(method: str, path: str, known: Iterable[str]) -> ApiError:
    """404: no route has this path."""
    shown, meant = path[:_MOST_CHARS], _meant(path[:_MOST_CHARS], sorted(known))
    hint = f"Did you mean {meant}? The" if meant else "The"
    message = f"Nothing is served at {method} {shown}. {hint} paths of this API are listed at /docs and /openapi.json."
    return ApiError(404, message, "invalid_request_error", code="not_found")


def _meant(path: str, known: list[str]) -> str:
    """The known path that the client meant, despite a wrong base URL or a typing error; empty when there is none.

    Base URLs often lack `/v1`, contain it twice, have a folder before it, or are already a complete path.
    """
    ends = [one for one in known if path.endswith(one.removeprefix(_PREFIX)) and one != "/"]
    if ends:
        return max(ends, key=len)
    return next(iter(get_close_matches(path, known, n=1, cutoff=_SIMILAR)), "")
