"""What the native engine asks of a rank group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from services.worker.kv_transfer.store import BlockRanks
from services.worker.process.failure import RankFailure
from services.worker.process.rank_group import GroupStarted
from services.worker.protocol.plan import StepPlan, StepResult


class Ranks(BlockRanks, Protocol):
    """Processes that compute plans."""

    on_result: Callable[[StepResult], None] | None

    async def start(self) -> GroupStarted:
        """Launch the ranks; raises RanksFailedError."""
        ...

    def submit(self, plan: StepPlan) -> None:
        """Hand a plan over; raises RanksFailedError."""
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
