"""The life of the rank group: started, watched, and started again when a rank is lost."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from services.common.lifecycle import GaveUpError, StartupError
from services.worker.api.core import WorkerCore
from services.worker.engine.loop import Engine
from services.worker.kv_transfer.store import BlockRanks
from services.worker.process.rank_group import GroupStarted, RankFailure, RanksFailedError
from services.worker.protocol.plan import StepPlan, StepResult

FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 30.0
STABLE_S = 60.0  # ranks that lived this long start the back-off anew

log = logging.getLogger(__name__)


class Ranks(BlockRanks, Protocol):
    """What is asked of a rank group."""

    on_result: Callable[[StepResult], None] | None

    async def start(self) -> GroupStarted:
        """Launch the ranks; raises RanksFailedError."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over."""
        ...

    async def wait_lost(self) -> str:
        """Wait until a rank is being lost; what is known of the reason."""
        ...

    async def wait_failed(self) -> RankFailure:
        """Wait until it is known why."""
        ...

    async def stop(self) -> None:
        """End all ranks."""
        ...


class RankKeeper:
    """Keeps one rank group alive for as long as the server runs.

    `engage` makes the engine of a group that has started and lets the core serve. `limit_s` bounds how long lost ranks
    are started again and again, 0 does not: where a device is gone, the process itself must go, so that whoever
    supervises it can start it elsewhere.
    """

    def __init__(
        self, ranks: Ranks, core: WorkerCore, engage: Callable[[GroupStarted], Engine], limit_s: float = 0.0
    ) -> None:
        self._ranks = ranks
        self._core = core
        self._engage = engage
        self._limit_s = limit_s

    async def run(self) -> None:
        """Until cancelled. Raises StartupError when the very first start fails: a configuration to be corrected.

        Raises GaveUpError when lost ranks do not come back within the limit.
        """
        try:
            try:
                engine = self._serve(await self._ranks.start())
            except RanksFailedError as error:
                raise StartupError(f"the ranks did not start: {error}") from error
            backoff = FIRST_BACKOFF_S
            while True:
                began = time.monotonic()
                self._core.lose(await self._lost(engine))
                self._ranks.on_result = None
                failure = await self._why(engine)
                log.error("ranks lost: %s", failure)
                self._core.life.lost(failure if isinstance(failure, RankFailure) else None)
                self._core.recover(str(failure))
                if time.monotonic() - began > STABLE_S:
                    backoff = FIRST_BACKOFF_S
                engine, backoff = await self._recover(backoff)
        finally:
            await self._ranks.stop()

    async def _lost(self, engine: Engine) -> str:
        """Until the ranks or the engine that leads them are lost; what is known of the reason: requests cannot wait."""
        lost = asyncio.create_task(self._ranks.wait_lost())
        try:
            await asyncio.wait((lost, engine.broken), return_when=asyncio.FIRST_COMPLETED)
            return engine.broken.result() if engine.broken.done() else lost.result()
        finally:
            lost.cancel()

    async def _why(self, engine: Engine) -> RankFailure | str:
        """The whole reason, once it is known: of the ranks, or of the engine that leads them."""
        return engine.broken.result() if engine.broken.done() else await self._ranks.wait_failed()

    async def _recover(self, backoff: float) -> tuple[Engine, float]:
        """Restart within the limit."""
        limit = asyncio.timeout(self._limit_s or None)
        try:
            async with limit:
                return await self._restart(backoff)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise GaveUpError(
                f"not serving for {self._limit_s:g} s (RYZANSTEIN_RECOVERY_LIMIT_S): {self._core.detail}"
            ) from error

    async def _restart(self, backoff: float) -> tuple[Engine, float]:
        """Try until the ranks are up; returns the new engine and the back-off for the next loss."""
        while True:
            await asyncio.sleep(backoff)
            backoff = min(backoff * 2, MAX_BACKOFF_S)
            try:
                return self._serve(await self._ranks.start()), backoff
            except RanksFailedError as error:
                log.error("restart failed, next try in %.1f s: %s", backoff, error)
                self._core.recover(str(error))

    def _serve(self, started: GroupStarted) -> Engine:
        log.info("%d ranks are ready after %.1f s", len(started.ranks), started.seconds)
        engine = self._engage(started)
        self._ranks.on_result = engine.on_result
        return engine
