"""A rank group in this process: the ranks of the scheduler's tests behind the interface of the real group."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence

from services.compute.ranks.config import RankGroupConfig
from services.compute.ranks.memory import MemoryAccount
from services.worker.process.failure import FailureKind, RankFailure, RanksFailedError
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.event_codec import ModelFacts, RankStarted
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.protocol.plan import StepPlan, StepResult
from tests.unit.worker.scheduling.fake_ranks import VOCAB, FakeRanks

FACTS = ModelFacts(vocab_size=VOCAB, hidden_size=8)


class FakeGroup:
    def __init__(self, config: RankGroupConfig) -> None:
        assert config.kv_tokens is not None
        self.config = config
        self.on_result: Callable[[StepResult], None] | None = None
        self.on_warming: Callable[[], None] = lambda: None
        self.n_blocks = config.kv_tokens // config.block_tokens
        self.step_s = 0.001
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.orders: list[AdapterOrder] = []
        self.may_load = asyncio.Event()
        self.may_load.set()
        self.to_take = 0  # bytes of its KV cache
        self.asleep = 0  # level of sleep; 0: awake
        self.may_wake = asyncio.Event()
        self.may_wake.set()
        self.start_failure: RankFailure | None = None
        self.starts = 0
        self.n_steps = 0
        self.signs = 0
        self.n_reads = 0
        self.read_error: Exception | None = None

    async def start(self) -> GroupStarted:
        await self.stop()
        await self.may_start.wait()
        if self.start_failure is not None:
            raise RanksFailedError(self.start_failure)
        self.starts += 1
        self.asleep = 0
        self._ranks = FakeRanks(self.n_blocks, self.config.block_tokens, self.config.max_running)
        self._plans: asyncio.Queue[StepPlan] = asyncio.Queue()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._failed: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._compute())
        memory = MemoryAccount(weights=1, workspace=2, kv=3, process=5)
        block_bytes = 8 * self.config.block_tokens
        phases = {"load": 0.5, "warm-up": 0.25}
        rank = RankStarted(0, 1, phases, memory, self.n_blocks, FACTS, block_bytes)
        return GroupStarted((rank,), self.n_blocks, FACTS, 0.75)

    def submit(self, plan: StepPlan) -> None:
        if self._failed.done():
            raise RanksFailedError(self._failed.result())
        self._plans.put_nowait(plan)

    async def read_blocks(self, blocks: Sequence[int], block_bytes: int) -> list[bytes]:
        self.n_reads += 1
        if self.read_error is not None:
            raise self.read_error
        failed = asyncio.ensure_future(self.wait_failed())
        done, _ = await asyncio.wait((failed,), timeout=self.step_s)
        failed.cancel()
        if done:
            raise RanksFailedError(failed.result())
        contents = [array("Q", self._ranks.kv[block]).tobytes() for block in blocks]
        assert {len(content) for content in contents} == {block_bytes}
        return contents

    async def write_blocks(self, blocks: Sequence[int], contents: Sequence[bytes]) -> None:
        for block, content in zip(blocks, contents, strict=True):
            self._ranks.kv[block] = array("Q", content).tolist()
        await asyncio.sleep(self.step_s)

    async def read_state(self, row: int, n_bytes: int) -> bytes:
        raise NotImplementedError("its sequences have no states")

    async def write_state(self, row: int, content: bytes) -> None:
        raise NotImplementedError("its sequences have no states")

    @property
    def held(self) -> int:
        return 1 if self.asleep else 100

    @property
    def promised(self) -> int:
        return 0 if self.asleep else self.to_take

    async def sleep(self, level: int) -> None:
        assert self._plans.empty()
        self.asleep = level
        self._ranks = FakeRanks(self.n_blocks, self.config.block_tokens, self.config.max_running)

    async def wake(self) -> None:
        await asyncio.wait(
            [asyncio.ensure_future(self.may_wake.wait()), self._failed], return_when=asyncio.FIRST_COMPLETED
        )
        if self._failed.done():
            raise RanksFailedError(self._failed.result())
        self.asleep = 0

    async def load_adapter(self, order: AdapterOrder) -> str:
        assert not self.asleep
        self.orders.append(order)
        await self.may_load.wait()
        return ""

    @property
    def lost(self) -> bool:
        return self._lost.done()

    async def wait_lost(self) -> str:
        return await asyncio.shield(self._lost)

    async def wait_failed(self) -> RankFailure:
        return await asyncio.shield(self._failed)

    async def stop(self) -> None:
        if self.starts:
            self._task.cancel()

    def begin_to_die(self) -> None:
        """No results come any more, without a reason."""
        self._task.cancel()
        self._lost.set_result("rank 1 is dying")

    def die(self) -> None:
        if not self._lost.done():
            self.begin_to_die()
        self._failed.set_result(RankFailure(1, FailureKind.EXITED, "killed by the test"))

    async def _compute(self) -> None:
        while True:
            plan = await self._plans.get()
            assert not self.asleep
            result = self._ranks.execute(plan)
            await asyncio.sleep(self.step_s)
            self.n_steps += 1
            assert self.on_result is not None
            self.on_result(result)
