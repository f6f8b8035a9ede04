"""Accounts, and what is counted for each of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Literal

from services.gateway.billing.prices import Cost
from services.gateway.usage import PredictionUsage, Usage

Kind = Literal["completions", "embeddings", "fine_tuning"]


@dataclass(frozen=True, slots=True)
class Account:
    """The requests, or the fine-tuning jobs, that are counted together."""

    kind: Kind
    tenant: str  # empty only when tenancy is off
    key: str  # id of the API key; empty: no key
    model: str
    batch: bool


@dataclass(frozen=True, slots=True)
class Counts:
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
        prediction = usage.prediction or PredictionUsage()
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

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(mine + its for mine, its in zip(_values(self), _values(other), strict=True)))

    def items(self) -> list[tuple[str, int]]:
        """The counters that are not zero, with their names."""
        return [(name, value) for name, value in zip(COUNTERS, _values(self), strict=True) if value]

    @property
    def tokens(self) -> int:
        """Tokens that count against quotas."""
        return self.input_tokens + self.output_tokens

    @property
    def cost(self) -> int:
        """The whole cost."""
        return self.input_cost + self.cached_cost + self.output_cost + self.training_cost


COUNTERS = tuple(counter.name for counter in fields(Counts))
_values = attrgetter(*COUNTERS)
