"""How long a request looks for its first worker while another model could take it over."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from typing import TypeVar

from services.gateway.errors import no_worker, overloaded
from services.gateway.generation.request import GenerationRequest
from services.gateway.upstream.workers import WorkerList

T = TypeVar("T")


class Takeovers:
    """The models behind a request's model in its chain, as a search for a worker sees them."""

    def __init__(self, request: GenerationRequest, listed: Callable[[], WorkerList]) -> None:
        self._model, self._caller, self._listed = request.model, request.caller, listed
        self.unserved = False  # the search has met no worker that can be reached

    @property
    def without_worker(self) -> bool:
        """Whether another model takes over when no worker is left."""
        return "no_worker" in self._caller.handed_on

    async def bound(self, search: Callable[[], Awaitable[T]], excluded: Collection[str]) -> T:
        """The result of a search for a worker that is none of the excluded ones.

        Raises :class:`ApiError` after the chain's time where another model takes over.
        """
        when = self._caller.handed_on
        soon = "overloaded" in when or (self.without_worker and not self._served(excluded))
        try:
            async with asyncio.timeout(self._caller.wait_s if soon else None) as limit:
                return await search()
        except TimeoutError:
            if not limit.expired():
                raise
        busy = not self.unserved and self._served(excluded)
        if ("overloaded" if busy else "no_worker") in when:
            raise overloaded("All workers are busy.") if busy else no_worker(self._model.name)
        return await search()

    def _served(self, excluded: Collection[str]) -> bool:
        return self._listed().pick(self._model.pool, "", excluded) is not None
