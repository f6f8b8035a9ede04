"""What the parts of a policy are: filters, scorers and pickers, each a pure function with a few settings."""

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
    """One worker, and why it."""

    worker: int
    reason: str


@dataclass(slots=True, eq=False)
class Candidates:
    """The workers that one request may still go to. Arrays are [n_workers]."""

    snapshot: Snapshot
    query: Query
    scored: Floats  # milliseconds; inf: was no candidate when somebody last asked for `costs`
    left: Mask | None  # None: all are
    decode_weight: float  # what a token of output counts for in tokens of prefill
    departure: str = "session rebound"  # why a session that does not stay leaves its worker
    stale: bool = False  # fewer are left than `scored` says

    def narrow(self, kept: Mask) -> None:
        """Only those go on; if that is nobody, all do."""
        if self.left is not None:
            kept = kept & self.left
        if np.count_nonzero(kept):
            self.left, self.stale = kept, True

    @property
    def costs(self) -> Floats:
        """In milliseconds; inf for those that are out."""
        if self.stale and self.left is not None:
            self.scored, self.stale = np.where(self.left, self.scored, np.inf), False
        return self.scored

    def indices(self) -> NDArray[np.intp]:
        """Who is left."""
        return np.arange(len(self.scored)) if self.left is None else self.left.nonzero()[0]

    def cheapest(self) -> float:
        """The lowest cost."""
        costs = self.costs
        return float(costs[costs.argmin()])  # several times as fast as min()


def _typed(schema: dict[str, Any]) -> None:
    schema["required"] = ["type", *schema.get("required", [])]


class PolicyPart(BaseModel, ABC):
    """A part of a policy; its fields are what an operator can set, besides its `type`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, json_schema_extra=_typed)

    uses_prefixes: ClassVar[bool] = False  # wants `matched_tokens`
    uses_sessions: ClassVar[bool] = False  # wants `bound`
    uses_costs: ClassVar[bool] = False  # what the scorers say matters to it


class Filter(PolicyPart):
    """Narrows the candidates down."""

    sessions_only: bool = False
    """Requests without a session pass it by."""
    busy_only: bool = False
    """Requests to a fleet with few requests per worker pass it by."""

    @abstractmethod
    def narrow(self, candidates: Candidates) -> Mask | Pick | None:
        """Who may stay, the only one who may, or None when there is nothing to say.

        A mask that would leave nobody is passed over.
        """


class Scorer(PolicyPart):
    """What a request would cost at each worker: the lower, the better. Costs are added up in milliseconds."""

    weight: Amount = 1.0
    """What its score is multiplied by: milliseconds for one of its units."""

    @abstractmethod
    def score(self, snapshot: Snapshot, query: Query, estimates: Estimates) -> Floats:
        """The score of every worker."""

    def scale(self, query: Query) -> float:
        """What the scores of this request are multiplied by, besides the weight."""
        return 1.0


class Picker(PolicyPart):
    """Takes one of the candidates that the filters left."""

    @abstractmethod
    def pick(self, candidates: Candidates) -> Pick:
        """The worker; there is at least one."""
