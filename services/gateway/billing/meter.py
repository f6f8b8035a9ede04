"""Counts the requests of an API in the ledger, with their costs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from msgspec.structs import replace

from services.common.fine_tuning.records import Order
from services.gateway.billing.account import Account, Counts, Kind
from services.gateway.billing.ledger import UsageLedger
from services.gateway.billing.prices import Cost, Prices
from services.gateway.tenants.tenant import Tenant
from services.gateway.usage import Usage


@dataclass(frozen=True, slots=True)
class Meter:
    """Counts requests."""

    ledger: UsageLedger
    prices: Prices
    batch: bool = False  # whether its requests are those of batches

    def priced(self, model: str, usage: Usage) -> Usage:
        """A usage with its cost, if the model has a price."""
        return replace(usage, cost=self._cost(model, usage).total) if self.prices.knows(model) else usage

    def count(self, kind: Kind, tenant: Tenant, model: str, usage: Usage) -> asyncio.Event:
        """Count a request; returns what is set when Redis has the count, or is away."""
        account = Account(kind, tenant.name, tenant.key_id, model, self.batch)
        return self.ledger.add(account, Counts.of(usage, self._cost(model, usage)))

    async def count_training(self, order: Order, tokens: int) -> None:
        """Count the tokens that a fine-tuning job has trained, once for each job; raises :class:`RedisAwayError`."""
        account = Account("fine_tuning", order.tenant, order.key_id, order.model, batch=False)
        cost = self.prices.training_cost(order.model, tokens)
        await self.ledger.add_once(order.id, account, Counts(trained_tokens=tokens, training_cost=cost))

    def _cost(self, model: str, usage: Usage) -> Cost:
        return self.prices.cost(model, usage, batch=self.batch)
