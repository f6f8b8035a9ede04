"""How much of a prompt a worker has cached."""

from __future__ import annotations

from typing import ClassVar, Literal

from services.router.policies.base import Scorer
from services.router.snapshot import Estimates, Floats, Query, Snapshot


class Prefix(Scorer):
    """The share of the prompt that the worker does not have cached, 0 to 1."""

    type: Literal["prefix"] = "prefix"

    uses_prefixes: ClassVar[bool] = True

    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """1 for all workers when the coordinator did not answer."""
        return 1.0 - estimates.matched_tokens / max(query.prompt_tokens, 1)
