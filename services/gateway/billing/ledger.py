"""Counts what requests used, in Redis, each request exactly once.

A request is added before the end of its answer is sent, and the answer's end waits until Redis has its count. Requests
that end together share a write. A gateway numbers its writes, and Redis keeps the number of its last one: a write that
is sent again, since its answer was lost, counts nothing twice. While Redis is away answers do not wait; counts wait in
memory, summed by minute and account, and are written when it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from services.common.keys import RedisKeys
from services.gateway.billing.account import Account, Counts
from services.gateway.billing.buckets import WIDTHS, Retention, start_of
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard
from services.gateway.usage import NANOS

log = logging.getLogger(__name__)

_MONTH_KEPT_S = 40 * 24 * 3600
_WRITER_KEPT_S = 7 * 24 * 3600  # longer than a write is sent again
_AGAIN_S = 0.25  # pause after a write that failed; the guard has longer ones
_ROWS_PER_WRITE = 250  # bounds how long a write holds Redis
_MAX_ROWS = 100_000  # most that wait in memory: about 50 MB

# A write is numbered: one that was executed already is left out. Amounts are texts, since Lua's numbers are doubles.
_WRITE = """
if tonumber(redis.call('GET', KEYS[1]) or '0') >= tonumber(ARGV[1]) then return 0 end
for position, increments in ipairs(cjson.decode(ARGV[2])) do
  local key = KEYS[position + 1]
  if increments.amount then
    redis.call('INCRBY', key, increments.amount)
  else
    for counter, amount in pairs(increments.fields) do redis.call('HINCRBY', key, counter, amount) end
  end
  redis.call('EXPIRE', key, increments.left_s)
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[3])
return 1
"""

Row = tuple[int, Account]  # the minute's start, and the account


@dataclass(slots=True)
class Entries:
    """Counts that are written together."""

    rows: dict[Row, Counts] = field(default_factory=dict)
    tried: asyncio.Event = field(default_factory=asyncio.Event)  # set by the first try to write them


class UsageLedger:
    """The counts of one gateway. `run` writes them."""

    def __init__(
        self,
        guard: RedisGuard,
        keys: RedisKeys,
        gateway_id: str,
        retention: Retention,
        metrics: GatewayMetrics,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._guard = guard
        self._keys = keys
        self._writer = keys.usage_writer(gateway_id)
        self._retention = retention
        self._metrics = metrics
        self._now = now
        self._script = guard.client.register_script(_WRITE)
        self._number = 0  # number of the current write, or the last one
        self._sending: dict[Row, Counts] = {}
        self._next = Entries()
        self._news = asyncio.Event()

    def add(self, account: Account, counts: Counts) -> asyncio.Event:
        """Count a request; returns what is set when Redis has the count, or is away."""
        self._show(account, counts)
        entries, row = self._next, (start_of(self._now(), "1m"), account)
        before = entries.rows.get(row)
        if before is None and len(entries.rows) >= _MAX_ROWS:
            self._metrics.unaccounted.inc(counts.tokens)
        else:
            entries.rows[row] = counts if before is None else before + counts
            self._news.set()
        return entries.tried

    async def add_once(self, name: str, account: Account, counts: Counts) -> None:
        """Count what has a name, unless any gateway has counted it in the last week; raises :class:`RedisAwayError`."""
        rows = {(start_of(self._now(), "1m"), account): counts}
        if await self._guard.run(lambda: self._store(self._keys.usage_writer(name), 1, rows)):
            self._show(account, counts)

    def _show(self, account: Account, counts: Counts) -> None:
        if counts.cost:
            self._metrics.cost.labels(account.model, account.tenant).inc(counts.cost / NANOS)

    @property
    def waiting_tokens(self) -> int:
        """Tokens that Redis does not have yet."""
        return sum(counts.tokens for rows in (self._sending, self._next.rows) for counts in rows.values())

    async def run(self) -> None:
        """Write counts until cancelled."""
        while True:
            await self._news.wait()
            if not await self._write():
                await asyncio.sleep(_AGAIN_S)

    async def aclose(self) -> None:
        """Write what is left, after `run`."""
        self._guard.skip_pause()
        while (self._sending or self._next.rows) and await self._write():
            pass
        if lost := self.waiting_tokens:
            self._metrics.unaccounted.inc(lost)
            log.warning("Redis is away, and %d tokens of this gateway are not counted", lost)

    async def _write(self) -> bool:
        """Try to write the counts that wait the longest; returns whether Redis took them."""
        entries = self._take()
        try:
            await self._guard.run(lambda: self._store(self._writer, self._number, self._sending))
        except RedisAwayError:
            entries.tried.set()
            self._next.tried.set()  # no answer waits while Redis is away
            return False
        self._sending = {}
        entries.tried.set()
        if not self._next.rows:
            self._news.clear()
        return True

    def _take(self) -> Entries:
        """Number the next write, unless the last one must be sent again."""
        entries = self._next
        if not self._sending:
            self._number += 1
            self._next = Entries(dict(islice(entries.rows.items(), _ROWS_PER_WRITE, None)))
            self._sending = dict(islice(entries.rows.items(), _ROWS_PER_WRITE))
        return entries

    async def _store(self, writer: str, number: int, rows: Mapping[Row, Counts]) -> bool:
        """Send a numbered write; returns whether it was new."""
        writes = self._writes(rows)
        body = msgspec.json.encode(list(writes.values()))
        return bool(await self._script(keys=[writer, *writes], args=[number, body, _WRITER_KEPT_S]))

    def _writes(self, rows: Mapping[Row, Counts]) -> dict[str, dict[str, object]]:
        """The sums that the script adds, by key of Redis."""
        hashes: dict[str, tuple[int, Counter[str]]] = {}
        months: Counter[str] = Counter()
        for (minute, account), counts in rows.items():
            named = {field_of(account, counter): amount for counter, amount in counts.items()}
            for key, left_s in self._buckets(minute):
                hashes.setdefault(key, (left_s, Counter()))[1].update(named)
            if account.tenant:
                month = month_of(minute)
                months[self._keys.quota(account.tenant, month)] += counts.tokens
                months[self._keys.spent(account.tenant, month)] += counts.cost
        written: dict[str, dict[str, object]] = {
            key: {"left_s": left_s, "fields": {name: str(amount) for name, amount in sums.items()}}
            for key, (left_s, sums) in hashes.items()
        }
        return written | {
            key: {"left_s": _MONTH_KEPT_S, "amount": str(amount)} for key, amount in months.items() if amount
        }

    def _buckets(self, minute: int) -> Iterator[tuple[str, int]]:
        """The keys of the buckets that hold a minute, with the time for which Redis keeps them."""
        now = self._now()
        for width in WIDTHS:
            start = start_of(minute, width)
            left_s = self._retention.left_s(start, width, now)
            if left_s > 0:
                yield self._keys.usage(width, start), left_s


def month_of(seconds: float) -> str:
    """The month (yyyymm, UTC) of a time in seconds since the epoch."""
    return time.strftime("%Y%m", time.gmtime(seconds))


def field_of(account: Account, counter: str) -> str:
    """The field of a bucket's hash that sums a counter of an account."""
    parts = (account.kind, account.tenant, account.key, account.model, account.batch, counter)
    return msgspec.json.encode(parts).decode()


def account_of(field_name: bytes) -> tuple[Account, str]:
    """The account and the counter of a field."""
    *parts, counter = msgspec.json.decode(field_name)
    return Account(*parts), counter
