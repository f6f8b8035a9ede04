"""How long a request would wait in the queue."""

from __future__ import annotations

from typing import Literal

from services.router.policies.base import Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot


class Queue(Scorer):
    """Milliseconds of prefill that are queued at the worker."""

    type: Literal["queue"] = "queue"

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """Queued tokens times the worker's time per token."""
        return snapshot.queued_tokens * snapshot.speeds.token_ms
