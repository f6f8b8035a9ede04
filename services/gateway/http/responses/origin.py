"""How a body of /v1/responses has come: over HTTP, over a WebSocket that remembers turns, or from a job."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from services.gateway.asgi import Scope, header, headers_of
from services.gateway.http.responses.store import Past

_SCOPE = "ryzanstein.responses"
OPEN_RESPONSES_HEADER = "openresponses-version"


class Recent(Protocol):
    """The turns that a connection remembers."""

    def get(self, response_id: str) -> Past | None:
        """The conversation that a response ends."""

    def add(self, response_id: str, past: Past) -> None:
        """Remember a turn."""


@dataclass(frozen=True, slots=True)
class NoneRecent:
    """Remembers no turn."""

    def get(self, response_id: str) -> Past | None:
        """See :class:`Recent`."""
        return None

    def add(self, response_id: str, past: Past) -> None:
        """See :class:`Recent`."""


@dataclass(frozen=True, slots=True)
class RequestOrigin:
    """The context of a request that its body does not state."""

    recent: Recent = field(default_factory=NoneRecent)
    response_id: str = ""  # the response that a job makes; empty: a new one
    created_at: int = 0
    replaces: str = ""  # digest of the kept response that has no answer yet
    open_names: bool = False  # events are those of Open Responses, where OpenAI's are named otherwise


ANYWHERE = RequestOrigin()


def origin_of(scope: Scope) -> RequestOrigin:
    """The origin that the gateway's own request has, or that of clients, with what the request's header says."""
    origin: RequestOrigin = scope.get(_SCOPE, ANYWHERE)
    return replace(origin, open_names=bool(header(headers_of(scope), OPEN_RESPONSES_HEADER.encode())))


def from_origin(origin: RequestOrigin) -> Mapping[str, object]:
    """The entry of a scope that has an origin."""
    return {_SCOPE: origin}
