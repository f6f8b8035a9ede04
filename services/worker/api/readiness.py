"""What a worker waits for before it gets requests: its model, its ranks, its lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from services.common.tasks import end_tasks

_SAY_S = 10.0

log = logging.getLogger(__name__)


class Readiness:
    """Why the worker is not ready, for `/readyz`; read from another thread."""

    def __init__(self) -> None:
        self._ask: Callable[[], str] = lambda: "starting"

    def __call__(self) -> str:
        """Empty when it is."""
        return self._ask()

    def depends_on(self, ask: Callable[[], str]) -> None:
        """From now on `ask` says."""
        self._ask = ask

    async def fetch_model(
        self, model: str, fetch: Callable[[Callable[[object], None]], Coroutine[Any, Any, Path]], stop: asyncio.Event
    ) -> Path | None:
        """The model's folder, None if `stop` came first; a download is reported here and in the log.

        `fetch` is called with what to call with a download that begins. Raises what it raises.
        """

        def begins(download: object) -> None:
            self._ask = download.__str__

        self._ask = lambda: f"fetching {model}"
        fetching = asyncio.create_task(fetch(begins), name="download")
        beside = [asyncio.create_task(self._say(), name="say"), asyncio.create_task(stop.wait(), name="stop")]
        try:
            await asyncio.wait((fetching, beside[-1]), return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() else None
        finally:
            self._ask = lambda: "starting"
            await end_tasks([fetching, *beside])

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(_SAY_S)
            log.info("%s", self())
