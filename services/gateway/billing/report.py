"""Reads what was counted: by bucket of time, filtered, and grouped."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from services.common.keys import RedisKeys
from services.gateway.billing.account import Account, Counts
from services.gateway.billing.buckets import Width
from services.gateway.billing.ledger import account_of
from services.gateway.tenants.redis_guard import RedisGuard

_AT_ONCE = 100  # buckets that one call reads

Bucket = Mapping[Account, Counts]
Group = TypeVar("Group")


@dataclass(frozen=True, slots=True)
class Selection:
    """The accounts that a report is about; None: of any value."""

    kinds: Collection[str] | None = None
    tenants: Collection[str] | None = None
    keys: Collection[str] | None = None
    models: Collection[str] | None = None
    batch: bool | None = None

    def holds(self, account: Account) -> bool:
        """Whether an account is one of them."""
        of = (
            (self.kinds, account.kind),
            (self.tenants, account.tenant),
            (self.keys, account.key),
            (self.models, account.model),
        )
        return all(allowed is None or value in allowed for allowed, value in of) and self.batch in (None, account.batch)


class UsageReader:
    """Reads buckets; raises :class:`RedisAwayError`."""

    def __init__(self, guard: RedisGuard, keys: RedisKeys) -> None:
        self._guard = guard
        self._keys = keys

    async def read(self, width: Width, starts: Sequence[int]) -> list[Bucket]:
        """The buckets that begin at `starts`; empty ones, and ones that are not kept, have no account."""
        buckets: list[Bucket] = []
        for first in range(0, len(starts), _AT_ONCE):
            buckets += await self._guard.run(partial(self._read, width, starts[first : first + _AT_ONCE]))
        return buckets

    async def _read(self, width: Width, starts: Sequence[int]) -> list[Bucket]:
        async with self._guard.client.pipeline(transaction=False) as pipe:
            for start in starts:
                pipe.hgetall(self._keys.usage(width, start))
            return [_bucket(fields) for fields in await pipe.execute()]


def _bucket(fields: Mapping[bytes, bytes]) -> Bucket:
    bucket: dict[Account, Counts] = {}
    for name, amount in fields.items():
        account, counter = account_of(name)
        bucket[account] = bucket.get(account, Counts())._replace(**{counter: int(amount)})
    return bucket


def grouped(
    bucket: Bucket, selection: Selection, group_of: Callable[[Account], Group]
) -> Iterable[tuple[Group, Counts]]:
    """The sums of the selected accounts by group, in the groups' order of first appearance."""
    sums: dict[Group, Counts] = {}
    for account, counts in bucket.items():
        if selection.holds(account):
            group = group_of(account)
            sums[group] = sums.get(group, Counts()) + counts
    return sums.items()
