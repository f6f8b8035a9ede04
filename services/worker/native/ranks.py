"""Interface of a rank group to the native engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.worker.kv_transfer.device import BlockRanks
from services.worker.process.failure import RankFailure
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.order_codec import AdapterOrder
from services.worker.protocol.plan import StepPlan, StepResult


class Ranks(BlockRanks, Protocol):
    """Processes that compute plans."""

    on_result: Callable[[StepResult], None] | None
    on_warming: Callable[[], None]  # a start or a wake has loaded the weights, and computes first steps

    @property
    def signs(self) -> int:
        """Grows while every rank shows signs of life, as long as there is work for them; also within a long step."""

    async def start(self) -> GroupStarted:
        """Launch the ranks; raises RanksFailedError."""

    def submit(self, plan: StepPlan) -> None:
        """Send a plan; raises RanksFailedError."""

    async def load_adapter(self, order: AdapterOrder) -> str:
        """Load an adapter into a slot; returns an error, or an empty text. Raises RanksFailedError."""

    @property
    def held(self) -> int:
        """Bytes that the ranks held after their start, or their last sleep or wake; 0 without ranks."""

    @property
    def promised(self) -> int:
        """Bytes that the ranks have yet to take for their KV cache after a wake."""
        ...

    async def sleep(self, level: int) -> None:
        """Give weights, KV cache and graphs back, after the submitted plans; raises RanksFailedError."""

    async def wake(self) -> None:
        """Rebuild what a sleep gave back; raises RanksFailedError."""

    async def wait_lost(self) -> str:
        """Wait for the first sign of a loss; returns the reason known so far."""

    async def wait_failed(self) -> RankFailure:
        """Wait for the cause of the loss."""

    async def stop(self) -> None:
        """End all ranks."""
