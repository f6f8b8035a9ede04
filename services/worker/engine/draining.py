"""The drain of an engine's requests, the same for all engines."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from services.worker.engine.changes import Changes

log = logging.getLogger(__name__)


class Requests(Protocol):
    """The requests of an engine that refuses new ones."""

    @property
    def changes(self) -> Changes:
        """Announces ends of requests."""
        ...

    @property
    def n_live(self) -> int:
        """Number of requests that have not ended."""
        ...

    def release(self, *, waiting_only: bool) -> int:
        """Hand requests off, all or those that have not begun; returns their number."""
        ...


async def drain_requests(requests: Requests, grace_s: float) -> tuple[int, int]:
    """Hand waiting requests off, let the others run for `grace_s`, then hand them off, too.

    Returns the numbers handed off and completed.
    """
    handed_off = requests.release(waiting_only=grace_s > 0)
    running = requests.n_live
    with requests.changes.watch() as changed:
        try:
            async with asyncio.timeout(grace_s):
                while requests.n_live:
                    await changed.wait()
                    changed.clear()
        except TimeoutError:
            log.info("the grace period is over")
    left = requests.release(waiting_only=False)
    return handed_off + left, running - left
