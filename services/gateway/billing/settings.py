"""Settings of what is counted, for how long, and what it costs."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from services.common.settings import ServiceSettings
from services.gateway.billing.buckets import Retention
from services.gateway.billing.prices import Prices, read_prices

_DAY_S = 24 * 3600


def _check_prices(text: str) -> str:
    read_prices(text)
    return text


def _check_status(status: int) -> int:
    if status not in (402, 429):
        raise ValueError("must be 429 or 402")
    return status


class BillingSettings(ServiceSettings):
    """Read once, at start."""

    usage_minutes_s: int = Field(
        default=2 * _DAY_S, ge=0, description="Seconds for which the usage of each minute is kept; 0: it is not kept"
    )
    usage_hours_s: int = Field(
        default=31 * _DAY_S, ge=0, description="Seconds for which the usage of each hour is kept; 0: it is not kept"
    )
    usage_days_s: int = Field(
        default=400 * _DAY_S, ge=0, description="Seconds for which the usage of each day is kept; 0: it is not kept"
    )
    prices: Annotated[str, AfterValidator(_check_prices)] = Field(
        default="{}",
        description='Prices per million tokens by model, `*` for all others, as JSON: `{"MODEL": {"input": 0.5, '
        '"cached_input": 0.1, "output": 1.5, "training": 2.0, "batch_factor": 0.5}}`; without `cached_input` cached '
        "tokens cost what others do, `training` is that of tokens that fine-tuning trains, `batch_factor` the part of "
        "these prices that tokens of batches cost (1 by default)",
    )
    currency: str = Field(
        default="usd", min_length=3, max_length=3, description="Currency of the prices, three letters of ISO 4217"
    )

    quota_status: Annotated[int, AfterValidator(_check_status)] = Field(
        default=429,
        description="Status of requests that a monthly quota or budget refuses, with `insufficient_quota`: 429 or 402",
    )

    @property
    def retention(self) -> Retention:
        """How long usage is kept."""
        return Retention(self.usage_minutes_s, self.usage_hours_s, self.usage_days_s)

    def read_prices(self) -> Prices:
        """The prices of all models."""
        return Prices(read_prices(self.prices), self.currency)
