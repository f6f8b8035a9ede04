"""How long loading the request's adapter takes."""

from __future__ import annotations

from typing import Literal

from services.router.estimates import expected_output
from services.router.policies.base import Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot

# Remaining tokens of running requests on average, as a share of an answer.
_LEFT = 0.5


class AdapterLoad(Scorer):
    """Milliseconds until the request's LoRA adapter is in a slot: the load, and the wait for a slot if all are in use.

    A worker that holds the adapter is preferred as long as its queue costs less than loading elsewhere. So cold
    adapters stay where they are, and hot ones spread.
    """

    type: Literal["adapter_load"] = "adapter_load"

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats | None:
        """From the times that the worker has measured; None without an adapter."""
        if query.adapter is None:
            return None
        return query.adapter.load_ms + query.adapter.waits * estimates.itl_ms * (_LEFT * expected_output(query))
