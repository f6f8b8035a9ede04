"""The server's interface to the ranks: start, submit plans, receive results and failures, stop."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import MemoryAccount
from services.worker.process.failure import FailureKind, RankFailure, RanksFailedError
from services.worker.process.rank_group_run import RankGroupRun
from services.worker.protocol.event_codec import ModelFacts, RankStarted
from services.worker.protocol.order_codec import AdapterOrder, SleepOrder, WakeOrder
from services.worker.protocol.plan import StepPlan, StepResult

__all__ = ["GroupStarted", "RankFailure", "RankGroup", "RankGroupConfig", "RanksFailedError"]

logger = logging.getLogger(__name__)
OnResult = Callable[[StepResult], None]


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """Facts that the ranks report when they are ready."""

    ranks: tuple[RankStarted, ...]  # by rank; each with its phases and its memory
    n_blocks: int  # usable KV blocks: ids 1 to n_blocks
    model: ModelFacts
    seconds: float  # duration of `start`

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of the slowest rank's start phases, by name."""
        return max((rank.phases for rank in self.ranks), key=lambda phases: sum(phases.values()))

    @property
    def snapshot_s(self) -> float:
        """Seconds of a copy of a state, on the slowest rank."""
        return max(rank.snapshot_s for rank in self.ranks)

    @property
    def memory(self) -> MemoryAccount:
        """The sum of the ranks' accounts."""
        return sum((rank.memory for rank in self.ranks), start=MemoryAccount())


class RankGroup:
    """One tensor-parallel group of rank processes under their launcher.

    The event loop calls `on_result`, set before `start`, with every result; that is the cheapest way. Without it,
    iterate over `results()`. It calls `on_warming`, also set before, when all ranks have their weights and compute
    first steps. After a failure or a stop, `start` makes a new group of processes.
    """

    def __init__(self, config: RankGroupConfig, on_result: OnResult | None = None) -> None:
        self.config = config
        self.on_result = on_result
        self.on_warming: Callable[[], None] = lambda: None
        self._queue: asyncio.Queue[StepResult | None] = asyncio.Queue()
        self._current: RankGroupRun | None = None

    @property
    def in_flight(self) -> int:
        """Number of submitted plans without a result."""
        return self._current.in_flight if self._current else 0

    @property
    def signs(self) -> int:
        """Grows while every rank shows signs of life, as long as there is work for them."""
        return self._current.signs if self._current else 0

    async def start(self) -> GroupStarted:
        """Launch the ranks and wait until all are warm. Raises RanksFailedError with the rank's error text."""
        began = time.monotonic()
        await self.stop()
        self._queue = asyncio.Queue()
        run = self._current = RankGroupRun(self.config, self._deliver, self._end_results, self.on_warming)
        try:
            ranks = await run.start()
        except RanksFailedError:
            self._current = None  # the failed run has ended its processes
            raise
        first = ranks[0]
        return GroupStarted(ranks, first.n_blocks, first.model, time.monotonic() - began)

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan to the ranks without blocking; at most `max_in_flight` may be in flight.

        Raises RanksFailedError when the ranks are gone.
        """
        self._living().submit(plan)

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """Contents of KV blocks, each the ranks' parts of `block_bytes` bytes, concatenated.

        Raises RanksFailedError when the ranks are gone.
        """
        return await self._living().copies.read(blocks, block_bytes)

    async def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Write contents that `read_blocks` of an equal group returned. Raises RanksFailedError without ranks."""
        await self._living().copies.write(blocks, contents)

    async def read_state(self, row: int, n_bytes: int) -> bytes:
        """The state in a row, the ranks' parts of `n_bytes` bytes, concatenated. Raises RanksFailedError."""
        return await self._living().copies.read_state(row, n_bytes)

    async def write_state(self, row: int, content: bytes) -> None:
        """Write what `read_state` of an equal group returned. Raises RanksFailedError."""
        await self._living().copies.write_state(row, content)

    async def load_adapter(self, order: AdapterOrder) -> str:
        """Load an adapter into a slot of all ranks; returns a rank's error, or an empty text.

        Plans submitted later find it there. Raises RanksFailedError when the ranks are gone.
        """
        return await asyncio.shield(self._living().order(order))

    @property
    def held(self) -> int:
        """Bytes that the ranks held after their start, or their last sleep or wake; 0 without ranks."""
        return self._current.held if self._current else 0

    @property
    def promised(self) -> int:
        """Bytes that the ranks have yet to take for their KV cache after a wake."""
        return self._current.promised if self._current else 0

    async def sleep(self, level: int) -> None:
        """Give weights, KV cache and graphs back, after the submitted plans. Raises RanksFailedError."""
        await asyncio.shield(self._living().order(SleepOrder(level)))

    async def wake(self) -> None:
        """Rebuild what a sleep gave back, within the time of a start. Raises RanksFailedError."""
        run = self._living()
        woken = run.order(WakeOrder())
        try:
            async with asyncio.timeout(self.config.start_timeout_s):
                await asyncio.shield(woken)
        except TimeoutError:
            limit = f"{self.config.start_timeout_s:g} s (RYZANSTEIN_START_TIMEOUT_S)"
            run.give_up(f"the ranks are not awake within {limit}")
            await asyncio.shield(woken)

    async def results(self) -> AsyncGenerator[StepResult, None]:
        """Yield results in step order until the group fails or is stopped. Yields none when `on_result` is set."""
        queue = self._queue
        while (result := await queue.get()) is not None:
            yield result

    async def wait_lost(self) -> str:
        """Wait until no more results will come; returns the reason known so far. `wait_failed` soon returns the cause.

        A rank's death is detected at once, while the kernel still frees the rank's memory.
        """
        return await asyncio.shield(self._living().lost)

    async def wait_failed(self) -> RankFailure:
        """Wait until the group has failed and its ranks are killed; returns the cause."""
        return await asyncio.shield(self._living().failed)

    async def stop(self) -> None:
        """End all processes of the group: a stop message, SIGTERM after a grace period, SIGKILL."""
        run, self._current = self._current, None
        if run is not None:
            await run.stop()

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
