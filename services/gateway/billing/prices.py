"""Prices of tokens, by model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from services.gateway.usage import NANOS, Usage

_NANOS_PER_TOKEN = NANOS // 10**6  # a token at a price of 1 per million
ANY_MODEL = "*"

Amount = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a request, in billionths of the currency."""

    input: int = 0
    cached: int = 0
    output: int = 0

    @property
    def total(self) -> float:
        """The sum, in the currency."""
        return (self.input + self.cached + self.output) / NANOS


_FREE = Cost()


class Price(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price of a million tokens."""

    input: Amount = 0.0
    cached_input: Amount | None = None  # None: as `input`
    output: Amount = 0.0
    training: Amount = 0.0  # tokens that fine-tuning trains
    batch_factor: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0  # part of the price that tokens of batches cost


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices by model; the model `*` stands for all others. A model without a price costs nothing."""

    by_model: Mapping[str, Price] = field(default_factory=dict)
    currency: str = "usd"

    def knows(self, model: str) -> bool:
        """Whether a model has a price."""
        return model in self.by_model or ANY_MODEL in self.by_model

    def training_cost(self, model: str, tokens: int) -> int:
        """The cost of training a model with so many tokens, in billionths of the currency."""
        price = self._of(model)
        return _nanos(tokens, price.training) if price else 0

    def cost(self, model: str, usage: Usage, *, batch: bool = False) -> Cost:
        """A request's cost; `batch`: it is one of a batch."""
        price = self._of(model)
        if price is None:
            return _FREE
        cached_price = price.input if price.cached_input is None else price.cached_input
        factor = price.batch_factor if batch else 1.0
        return Cost(
            _nanos(usage.prompt_tokens - usage.cached_tokens, factor * price.input),
            _nanos(usage.cached_tokens, factor * cached_price),
            _nanos(usage.completion_tokens, factor * price.output),
        )

    def _of(self, model: str) -> Price | None:
        return self.by_model.get(model) or self.by_model.get(ANY_MODEL)


def read_prices(text: str) -> dict[str, Price]:
    """Prices of a JSON object, model -> price; raises ValueError that names what is wrong."""
    try:
        return msgspec.json.decode(text, type=dict[str, Price])
    except msgspec.DecodeError as error:
        raise ValueError(f"must be a JSON object of prices by model: {error}") from error


def _nanos(tokens: int, per_million: float) -> int:
    return round(tokens * per_million * _NANOS_PER_TOKEN)
