"""How much re-prefill the survivors of a worker take on per second."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass


@dataclass(slots=True)
class _Bucket:
    tokens: float
    filled_at: float


class BudgetExhaustedError(Exception):
    """Too many requests are resumed on a worker already."""

    def __init__(self, retry_after_s: float) -> None:
        super().__init__(f"the resume budget is used up for {retry_after_s:.1f} s")
        self.retry_after_s = retry_after_s


class ResumeBudget:
    """A token bucket per surviving worker, in prefill tokens: one death cannot start a re-prefill storm.

    A request larger than the whole bucket takes it into debt, so it is delayed but never starved. Who comes while the
    debt is larger than his patience is refused at once, and so the debt is bounded.
    """

    def __init__(self, tokens_per_s: float, burst_s: float = 1.0) -> None:
        self._rate = tokens_per_s
        self._burst = tokens_per_s * burst_s
        self._buckets: dict[str, _Bucket] = {}

    async def admit(self, worker_id: str, tokens: int, patience_s: float) -> None:
        """Return when the worker may be given `tokens` more to prefill; raises :class:`BudgetExhaustedError`."""
        now = asyncio.get_running_loop().time()
        bucket = self._buckets.setdefault(worker_id, _Bucket(self._burst, now))
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.filled_at) * self._rate)
        bucket.filled_at = now
        debt_s = -bucket.tokens / self._rate
        if debt_s > patience_s:
            raise BudgetExhaustedError(debt_s - patience_s)
        bucket.tokens -= tokens
        if bucket.tokens < 0:
            await asyncio.sleep(-bucket.tokens / self._rate)
