"""The ranks as the server sees them: start, submit plans, get results, learn of failures, stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from services.worker.process.failure import FailureKind, RankFailure, RanksFailedError
from services.worker.process.rank_group_run import RankGroupRun
from services.worker.protocol.event_codec import ModelFacts, RankStarted
from services.worker.protocol.ledger import MemoryLedger
from services.worker.protocol.plan import StepPlan, StepResult
from services.worker.protocol.rank_config import RankGroupConfig

__all__ = ["GroupStarted", "RankFailure", "RankGroup", "RankGroupConfig", "RanksFailedError"]

logger = logging.getLogger(__name__)
OnResult = Callable[[StepResult], None]


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """What the ranks said when they were ready."""

    ranks: tuple[RankStarted, ...]  # by rank; each with its phases and its memory ledger
    n_blocks: int  # usable KV blocks: ids 1 to n_blocks
    model: ModelFacts
    seconds: float  # from the call of start

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by name, of the slowest rank."""
        return max((rank.phases for rank in self.ranks), key=lambda phases: sum(phases.values()))

    @property
    def ledger(self) -> MemoryLedger:
        """Of the fullest rank."""
        return max((rank.ledger for rank in self.ranks), key=lambda ledger: ledger.total)


class RankGroup:
    """One tensor-parallel group of rank processes under their launcher.

    Set `on_result` before `start` to be called from the event loop with every result (the cheapest way), or iterate
    over `results()`. After a failure or a stop, `start` makes a fresh group.
    """

    def __init__(self, config: RankGroupConfig, on_result: OnResult | None = None) -> None:
        self.config = config
        self.on_result = on_result
        self._queue: asyncio.Queue[StepResult | None] = asyncio.Queue()
        self._current: RankGroupRun | None = None

    @property
    def in_flight(self) -> int:
        """Plans that were submitted and not answered."""
        return self._current.in_flight if self._current else 0

    async def start(self) -> GroupStarted:
        """Launch the ranks and wait until all are warm. Raises RanksFailedError with the rank's own error text."""
        began = time.monotonic()
        await self.stop()
        self._queue = asyncio.Queue()
        run = self._current = RankGroupRun(self.config, self._deliver, self._end_results)
        try:
            ranks = await run.start()
        except RanksFailedError:
            self._current = None  # nothing is left of it
            raise
        first = ranks[0]
        return GroupStarted(ranks, first.n_blocks, first.model, time.monotonic() - began)

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to the ranks without blocking; at most `max_in_flight` may be in flight.

        Raises RanksFailedError when the ranks are gone.
        """
        self._living().submit(plan)

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """The contents of KV blocks, the ranks' parts of `block_bytes` bytes one after the other.

        Raises RanksFailedError when the ranks are gone.
        """
        return await self._living().copies.read(blocks, block_bytes)

    async def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Write what `read_blocks` of an equal group returned. Raises RanksFailedError when the ranks are gone."""
        await self._living().copies.write(blocks, contents)

    async def results(self) -> AsyncGenerator[StepResult, None]:
        """Yield results in step order until the group fails or is stopped. Not together with `on_result`."""
        queue = self._queue
        while (result := await queue.get()) is not None:
            yield result

    async def wait_lost(self) -> str:
        """Wait until no more results will come; what is known of the reason then. `wait_failed` says why, soon after.

        A dying rank is noticed at once, while the kernel still takes its memory apart.
        """
        return await asyncio.shield(self._started().lost)

    async def wait_failed(self) -> RankFailure:
        """Wait until the group fails; its ranks have been killed by then."""
        return await asyncio.shield(self._started().failed)

    async def stop(self) -> None:
        """End the ranks: ask, SIGTERM after a grace, SIGKILL. On return no process of the group is left."""
        run, self._current = self._current, None
        if run is not None:
            await run.stop()

    def _started(self) -> RankGroupRun:
        if self._current is None:
            raise RuntimeError("the group was not started")
        return self._current

    def _living(self) -> RankGroupRun:
        if self._current is None:
            raise RanksFailedError(RankFailure(None, FailureKind.LAUNCH, "the group was not started"))
        return self._current

    def _deliver(self, result: StepResult) -> None:
        if self.on_result is not None:
            self.on_result(result)
        else:
            self._queue.put_nowait(result)

    def _end_results(self) -> None:
        self._queue.put_nowait(None)
