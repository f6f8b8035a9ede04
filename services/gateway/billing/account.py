"""Accounts, and what is counted for each of them."""

from __future__ import annotations

from operator import add
from typing import Literal, NamedTuple

from services.gateway.billing.prices import Cost
from services.gateway.usage import PredictionUsage, Usage

Kind = Literal["completions", "embeddings", "fine_tuning"]
_NO_PREDICTION = PredictionUsage()


class Account(NamedTuple):
    """The requests, or the fine-tuning jobs, that are counted together."""

    kind: Kind
    tenant: str  # empty only when tenancy is off
    key: str  # id of the API key; empty: no key
    model: str
    batch: bool


class Counts(NamedTuple):
    """Sums over the requests of an account. Costs are in billionths of the currency."""

    requests: int = 0
    input_tokens: int = 0  # cached ones included
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_tokens: int = 0  # drafted from predictions, in the output
    rejected_tokens: int = 0  # drafted from predictions, not in the output
    input_cost: int = 0  # cost of input tokens that were not cached
    cached_cost: int = 0
    output_cost: int = 0
    trained_tokens: int = 0
    training_cost: int = 0

    @classmethod
    def of(cls, usage: Usage, cost: Cost) -> Counts:
        """The counts of one request."""
        prediction = usage.prediction or _NO_PREDICTION
        return cls(
            1,
            usage.prompt_tokens,
            usage.cached_tokens,
            usage.completion_tokens,
            prediction.accepted_tokens,
            prediction.rejected_tokens,
            cost.input,
            cost.cached,
            cost.output,
        )

    def __add__(self, other: Counts) -> Counts:  # type: ignore[override]  # it adds each counter
        return Counts(*map(add, self, other))

    def items(self) -> list[tuple[str, int]]:
        """The counters that are not zero, with their names."""
        return [(name, value) for name, value in zip(COUNTERS, self, strict=True) if value]

    @property
    def tokens(self) -> int:
        """Tokens that count against quotas."""
        return self.input_tokens + self.output_tokens

    @property
    def cost(self) -> int:
        """The whole cost."""
        return self.input_cost + self.cached_cost + self.output_cost + self.training_cost


COUNTERS = Counts._fields
