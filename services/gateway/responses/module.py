"""The part of a gateway that makes responses in the background."""

from __future__ import annotations

from services.gateway.asgi import ASGIApp
from services.gateway.claims import JobClaims
from services.gateway.drain import Drain
from services.gateway.http.responses.queue import BackgroundQueue
from services.gateway.responses.run import BackgroundContext, BackgroundRun


def background_claims(queue: BackgroundQueue, routes: ASGIApp, places: int, gateway_id: str, drain: Drain) -> JobClaims:
    """The runner that claims and makes responses; `routes` take stored credentials, `places` are made at once."""
    context = BackgroundContext(queue, routes)
    return JobClaims(
        queue.claim,
        lambda claim, stopping: BackgroundRun(claim, context, stopping),
        places,
        gateway_id,
        drain,
        queue.woken,
    )
