"""Base classes for the parts of a policy: filters, scorers and pickers, each a pure function with a few settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from services.router.snapshot import Estimates, Floats, Query, Snapshot

Mask = NDArray[np.bool_]
Factor = Annotated[float, Field(ge=1, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Pick(NamedTuple):
    """One worker, and the reason for choosing it."""

    worker: int
    reason: str


@dataclass(slots=True, eq=False)
class Candidates:
    """The workers to which one request may still go. Arrays are [n_workers]."""

    snapshot: Snapshot
    query: Query
    scored: Floats  # milliseconds; inf: not a candidate at the last read of `costs`
    left: Mask | None  # None: all workers
    decode_weight: float  # weight of decode time in the cost
    departure: str = "session rebound"  # the reason, if the session leaves its worker
    stale: bool = False  # `left` has shrunk since `scored` was computed

    def narrow(self, mask: Mask) -> None:
        """Keep only the workers of the mask; ignore a mask that would leave none."""
        if self.left is not None:
            mask = mask & self.left
        if np.count_nonzero(mask):
            self.left, self.stale = mask, True

    @property
    def costs(self) -> Floats:
        """Milliseconds; inf for workers that are no candidates."""
        if self.stale and self.left is not None:
            self.scored, self.stale = np.where(self.left, self.scored, np.inf), False
        return self.scored

    def indices(self) -> NDArray[np.intp]:
        """Indices of the remaining workers."""
        return np.arange(len(self.scored)) if self.left is None else self.left.nonzero()[0]

    def cheapest(self) -> float:
        """The lowest cost."""
        costs = self.costs
        return float(costs[costs.argmin()])  # several times as fast as min()


def _typed(schema: dict[str, Any]) -> None:
    schema["required"] = ["type", *schema.get("required", [])]


class PolicyPart(BaseModel, ABC):
    """A part of a policy. Operators set its fields, and select it by its `type`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=_typed)

    uses_prefixes: ClassVar[bool] = False  # reads `matched_tokens`
    uses_sessions: ClassVar[bool] = False  # reads `bound`
    uses_costs: ClassVar[bool] = False  # reads `costs`


class Filter(PolicyPart):
    """Narrows the candidates down."""

    sessions_only: bool = False
    """Apply only to requests with a session."""
    busy_only: bool = False
    """Apply only while the fleet is busy, with several requests per worker."""

    @abstractmethod
    def narrow(self, candidates: Candidates) -> Mask | Pick | None:
        """A mask of the workers to keep, a pick that ends the choice, or None to keep all.

        A mask that would leave no worker is ignored.
        """


class Scorer(PolicyPart):
    """The cost of a request at each worker: the lower, the better. Costs are added up in milliseconds."""

    weight: Amount = 1.0
    """Factor of its score: milliseconds per unit of the score."""

    @abstractmethod
    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats | None:
        """The score of every worker; None: 0 for all."""

    def scale(self, query: Query) -> float:
        """Another factor for the scores of this request, besides the weight."""
        return 1.0


class Picker(PolicyPart):
    """Takes one of the remaining candidates."""

    @abstractmethod
    def pick(self, candidates: Candidates) -> Pick:
        """The worker. There is at least one candidate."""
