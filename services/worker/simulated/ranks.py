"""Ranks without processes: a step takes the time that a curve says, and draws tokens of a language."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import MemoryAccount
from services.worker.process.failure import FailureKind, RankFailure, RanksFailedError
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.event_codec import ModelFacts, RankStarted
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.protocol.plan import StepPlan, StepResult, StepTimes
from services.worker.scheduling.step_builder import StepLoad
from services.worker.simulated.curve import StepCurve
from services.worker.simulated.language import KV_BYTES, Language
from services.worker.simulated.sequences import Sequences

_SIGNS_PER_S = 10


@dataclass(frozen=True, slots=True)
class Simulation:
    """The resources that all virtual workers of a process share."""

    curve: StepCurve
    language: Language
    model: ModelFacts
    kv_bytes_per_token: int  # on a rank
    speed: float  # a step takes 1 / speed of its time on the curve


class SimulatedRanks:
    """Implements `Ranks` in this process. `lose` and `stall` are faults."""

    def __init__(self, config: RankGroupConfig, simulation: Simulation) -> None:
        self.config = config
        self.on_result: Callable[[StepResult], None] | None = None
        self.on_warming: Callable[[], None] = lambda: None  # there is nothing to warm
        self._simulation = simulation
        self._roots: dict[int, bytes] = {}  # adapters' roots, by slot
        self._sequences: Sequences | None = None  # None: no ranks run
        self._due: deque[tuple[float, StepResult]] = deque()  # results by their times
        self._timer: asyncio.TimerHandle | None = None
        self._free_at = 0.0  # when the ranks have computed all plans
        self._stalled_until = 0.0
        self._signs = 0
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()

    # -- life --------------------------------------------------------------------------------------------------

    async def start(self) -> GroupStarted:
        """Start with an empty KV cache."""
        await self.stop()
        loop, config, simulation = asyncio.get_running_loop(), self.config, self._simulation
        self._lost, self._failed = loop.create_future(), loop.create_future()
        self._free_at = self._stalled_until = 0.0
        self._roots = {}
        self._sequences = Sequences(simulation.language, config.blocks_wanted, simulation.model.hidden_size)
        block_bytes = max(KV_BYTES, simulation.kv_bytes_per_token * config.block_tokens)
        rank = RankStarted(0, os.getpid(), {}, MemoryAccount(), config.blocks_wanted, simulation.model, block_bytes)
        return GroupStarted((rank,) * config.ranks, config.blocks_wanted, simulation.model, 0.0)

    async def stop(self) -> None:
        """End the ranks; plans in flight have no results."""
        self._sequences = None
        self._due.clear()
        self._arm()

    @property
    def held(self) -> int:
        """Simulated ranks hold no memory."""
        return 0

    @property
    def promised(self) -> int:
        """Simulated ranks take no memory."""
        return 0

    @property
    def signs(self) -> int:
        """Grows with the time while a plan is computed, except during a stall."""
        now = time.monotonic()
        if self._due and now >= self._stalled_until:
            self._signs = int(now * _SIGNS_PER_S)
        return self._signs

    async def sleep(self, level: int) -> None:
        """Forget the KV cache, after the plans in flight. Raises RanksFailedError."""
        self._living().forget_kv()

    async def wake(self) -> None:
        """Do nothing. Raises RanksFailedError without ranks."""
        self._living()

    @property
    def kv(self) -> list[bytes]:
        """The KV of every block, by its number. Raises RanksFailedError."""
        return self._living().kv

    # -- faults ------------------------------------------------------------------------------------------------

    def lose(self, failure: RankFailure) -> None:
        """Lose the ranks with their KV and the plans in flight; the engine starts them again."""
        if self._sequences is None:
            return
        self._sequences = None
        self._due.clear()
        self._arm()
        self._lost.set_result(str(failure))
        self._failed.set_result(failure)

    def stall(self, seconds: float) -> None:
        """Compute nothing for a time. Beyond the limit of a stall the ranks are lost, as those of a real group are."""
        now, limit = time.monotonic(), self.config.stall_timeout_s
        self._stalled_until = now + seconds
        self._free_at = max(self._free_at, now) + seconds
        self._due = deque((at + seconds, result) for at, result in self._due)
        self._arm()
        if self._due and seconds > limit:
            failure = RankFailure(0, FailureKind.STALLED, f"simulated: no heartbeat for {limit:g} s")
            asyncio.get_running_loop().call_later(limit, self._lose_if, self._lost, failure)

    def _lose_if(self, run: asyncio.Future[str], failure: RankFailure) -> None:
        if run is self._lost:  # the ranks have not been started again meanwhile
            self.lose(failure)

    async def wait_lost(self) -> str:
        """Wait for a loss; returns the reason."""
        return await asyncio.shield(self._lost)

    async def wait_failed(self) -> RankFailure:
        """Wait for the cause of the loss."""
        return await asyncio.shield(self._failed)

    # -- work --------------------------------------------------------------------------------------------------

    def submit(self, plan: StepPlan) -> None:
        """Compute a plan, whose result comes when its time is over. Raises RanksFailedError."""
        slots, decode_keys = self._living().compute(plan, self._roots)
        load = StepLoad.of(plan.chunks)
        n_decodes = load.n_rows - load.n_prefill_rows
        seconds = self._simulation.curve.seconds(n_decodes, decode_keys, load.n_prefill_rows, load.n_keys)
        seconds /= self._simulation.speed
        # From the planned end of the step before: delays of this process's event loop do not add up.
        self._free_at = max(self._free_at, time.monotonic()) + seconds
        self._due.append((self._free_at, StepResult(plan.step, slots, StepTimes(forward=round(seconds * 1e6)))))
        if len(self._due) == 1:
            self._arm()

    def _arm(self) -> None:
        """Set the timer of the next result."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due:
            wait_s = max(0.0, self._due[0][0] - time.monotonic())
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._deliver)

    def _deliver(self) -> None:
        self._timer = None
        _, result = self._due.popleft()
        self._arm()
        if self.on_result is not None:
            self.on_result(result)

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        """The KV of blocks, each with zeros up to the size of a real block. Raises RanksFailedError."""
        kv, size = self.kv, block_bytes * self.config.ranks
        return [kv[block].ljust(size, b"\0") for block in blocks]

    async def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        """Overwrite the KV of blocks. Raises RanksFailedError."""
        kv = self.kv
        for block, content in zip(blocks, contents, strict=True):
            kv[block] = content[:KV_BYTES]

    async def read_state(self, row: int, n_bytes: int) -> bytes:
        """Zeros: simulated sequences have no states. Raises RanksFailedError."""
        self._living()
        return bytes(n_bytes * self.config.ranks)

    async def write_state(self, row: int, content: bytes) -> None:
        """Do nothing. Raises RanksFailedError."""
        self._living()

    async def load_adapter(self, order: AdapterOrder) -> str:
        """Load an adapter: its digest changes every token. Raises RanksFailedError."""
        self._living()
        self._roots[order.slot] = bytes.fromhex(order.digest)[:32]
        return ""

    def _living(self) -> Sequences:
        if self._sequences is None:
            reason = (
                self._failed.result() if self._failed.done() else RankFailure(None, FailureKind.LAUNCH, "not started")
            )
            raise RanksFailedError(reason)
        return self._sequences
