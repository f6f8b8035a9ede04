"""Readiness of a worker: it needs its model, its ranks and its lease."""

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
    """Answers `/readyz` with the reason why the worker is not ready; called from another thread."""

    def __init__(self) -> None:
        self._ask: Callable[[], str] = lambda: "starting"

    def __call__(self) -> str:
        """The reason; empty when the worker is ready."""
        return self._ask()

    def depends_on(self, ask: Callable[[], str]) -> None:
        """Get the reason from `ask` from now on."""
        self._ask = ask

    async def fetch_model(
        self, model: str, fetch: Callable[[Callable[[object], None]], Coroutine[Any, Any, Path]], stop: asyncio.Event
    ) -> Path | None:
        """The model's folder; None if `stop` was set first. Reports a download in the reason and in the log.

        Calls `fetch` with a callback, which `fetch` calls when a download begins. Raises the errors of `fetch`.
        """

        def begins(download: object) -> None:
            self._ask = download.__str__

        self._ask = lambda: f"fetching {model}"
        fetching = asyncio.create_task(fetch(begins), name="download")
        background = [asyncio.create_task(self._say(), name="say"), asyncio.create_task(stop.wait(), name="stop")]
        try:
            await asyncio.wait((fetching, background[-1]), return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() else None
        finally:
            self._ask = lambda: "starting"
            await end_tasks([fetching, *background])

    async def _say(self) -> None:
        while True:
            await asyncio.sleep(_SAY_S)
            log.info("%s", self())
