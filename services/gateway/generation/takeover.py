"""How long a request looks for its first worker while another model could take it over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from typing import TypeVar

from services.gateway.errors import no_worker, overloaded
from services.gateway.generation.request import GenerationRequest
from services.gateway.upstream.patience import StartPatience
from services.gateway.upstream.workers import WorkerList

# The part of the chain's time that routers wait for a model without a serving worker. They refuse before the whole time
# is over, because they know that there is none: the gateway's list of workers may be a second old.
_ROUTERS_PART = 0.9

T = TypeVar("T")


class Takeovers:
    """The models behind a request's model in its chain, as a search for a worker sees them."""

    def __init__(self, request: GenerationRequest, listed: Callable[[], WorkerList]) -> None:
        self._model, self._caller, self._listed = request.model, request.caller, listed
        self.unserved = False  # the search has met no worker that can be reached
        self._cold_until: float | None = None  # event-loop time; None: no search, or no model takes over

    @property
    def without_worker(self) -> bool:
        """Whether another model takes over when no worker is left."""
        return "no_worker" in self._caller.handed_on

    def shorten(self, patience: StartPatience) -> StartPatience:
        """A request's patience with the start of its model, which ends sooner where another model takes over."""
        if self._cold_until is None:
            return patience
        until = self._cold_until if patience.until is None else min(patience.until, self._cold_until)
        return replace(patience, until=until)

    async def bound(self, search: Callable[[], Awaitable[T]], excluded: Collection[str]) -> T:
        """The result of a search for a worker that is none of the excluded ones.

        Raises :class:`ApiError` after the chain's time where another model takes over.
        """
        when, wait_s = self._caller.handed_on, self._caller.wait_s
        if not when:
            return await search()
        if self.without_worker and wait_s is not None:
            self._cold_until = asyncio.get_running_loop().time() + _ROUTERS_PART * wait_s
        try:
            async with asyncio.timeout(wait_s if "overloaded" in when else None) as limit:
                return await search()
        except TimeoutError:
            if not limit.expired():
                raise
        finally:
            self._cold_until = None
        busy = not self.unserved and self._served(excluded)
        if ("overloaded" if busy else "no_worker") in when:
            raise overloaded("All workers are busy.") if busy else no_worker(self._model.name)
        return await search()

    def _served(self, excluded: Collection[str]) -> bool:
        return self._listed().serves(self._model.pool, excluded)
