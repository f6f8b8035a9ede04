"""When the first token would come."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.policies.base import Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot


class TimeToFirstToken(Scorer):
    """Milliseconds until the first token: queue and prompt, less prefixes cached there or worth fetching."""

    type: Literal["time_to_first_token"] = "time_to_first_token"

    uses_prefixes: ClassVar[bool] = True

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """From the speeds that the worker has measured."""
        return estimates.ttft_ms
