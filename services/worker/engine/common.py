"""The parts that engines share: phase, totals, live requests and their drain."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.engine.base import LifeObserver, phase_name
from services.worker.engine.changes import Changes
from services.worker.engine.kv_events import KvEventLog
from services.worker.engine.request import EngineRequest
from services.worker.engine.state import EngineCounters, EngineFacts, EngineModel, TransferTotals

log = logging.getLogger(__name__)

DRAINING = pb.Handoff(reason=pb.Handoff.REASON_DRAIN, detail="the worker is draining")
# Why an engine that does not serve leaves a request to another worker, by its phase.
REFUSALS = {
    pb.PHASE_LOADING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is still loading its model"),
    # Not RANKS_LOST: the lost ranks did not compute this request, so it is no suspect.
    pb.PHASE_RECOVERING: pb.Handoff(reason=pb.Handoff.REASON_LOADING, detail="the worker is restarting its ranks"),
    pb.PHASE_DRAINING: DRAINING,
}

LiveT = TypeVar("LiveT")


class CommonEngine(ABC, Generic[LiveT]):
    """Base of engines; `LiveT` is an engine's state of a request that has not ended."""

    def __init__(self, model: EngineModel, life: LifeObserver, detail: str) -> None:
        """`detail`: message for people while the engine loads."""
        self.model = model
        self.facts: EngineFacts | None = None
        self.phase: pb.Phase = pb.PHASE_LOADING
        self.detail = detail
        self.changes = Changes()
        self.kv_events = KvEventLog()
        self.counters = EngineCounters()
        self.transfers = TransferTotals()
        self._life = life
        self._live: dict[EngineRequest, LiveT] = {}

    def _enter(self, phase: pb.Phase, detail: str) -> None:
        if self.phase == pb.PHASE_DRAINING:  # final: the process will end
            phase = pb.PHASE_DRAINING
        self.phase, self.detail = phase, detail
        log.info("phase %s", phase_name(phase), extra={"detail": detail})
        self.changes.announce()

    def _restart_failed(self, error: Exception) -> None:
        self._enter(pb.PHASE_RECOVERING, str(error))

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Refuse new requests, hand waiting ones off, run the others for `grace_s`, then hand these off.

        Returns the numbers handed off and completed.
        """
        self._enter(pb.PHASE_DRAINING, "draining")
        self._life.on_drain()
        handed_off = self._release(waiting_only=grace_s > 0)
        running = len(self._live)
        with self.changes.watch() as changed:
            try:
                async with asyncio.timeout(grace_s):
                    while self._live:
                        await changed.wait()
                        changed.clear()
            except TimeoutError:
                log.info("the grace period is over")
        left = self._release(waiting_only=False)
        return handed_off + left, running - left

    @abstractmethod
    def _release(self, *, waiting_only: bool) -> int:
        """Hand requests off, all or those that have not begun; returns their number."""
