"""Writes the log of requests, from which capacity is planned, into a stream in Redis."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from services.common.keys import RedisKeys
from services.common.request_log import LoggedRequest, digest_of, logged_blocks
from services.gateway.generation.request import GenerationRequest
from services.gateway.telemetry import GatewayMetrics
from services.gateway.tenants.redis_guard import RedisAwayError, RedisGuard

_EVERY_S = 0.5
_PER_WRITE = 200  # entries that hold Redis at once
_MOST_WAITING = 10_000  # entries in memory while Redis is away


class RequestLog:
    """The log of one gateway. `add` waits for nothing; `run` writes. It holds lengths and digests, never a text."""

    def __init__(
        self, guard: RedisGuard, keys: RedisKeys, most_entries: int, life_s: int, metrics: GatewayMetrics
    ) -> None:
        """`most_entries`: what the stream keeps; 0: nothing is logged."""
        self._guard, self._key = guard, keys.request_log
        self._most_entries, self._life_s, self._metrics = most_entries, life_s, metrics
        self._waiting: deque[LoggedRequest] = deque()

    def add(self, request: GenerationRequest, answer_tokens: int, age_s: float) -> None:
        """Log a sequence that has ended, `age_s` after its arrival."""
        if not self._most_entries or request.embed:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._metrics.unlogged.inc()
            return
        caller = request.caller
        self._waiting.append(
            LoggedRequest(
                time.time() - age_s,
                request.model.pool,
                len(request.prompt_ids),
                answer_tokens,
                digest_of(caller.tenant),
                digest_of(f"{caller.tenant}\0{caller.session}") if caller.session else "",
                logged_blocks(request.block_hashes),
            )
        )

    async def run(self) -> None:
        """Write entries until cancelled."""
        while True:
            await asyncio.sleep(_EVERY_S)
            while self._waiting and await self._write():
                pass

    async def aclose(self) -> None:
        """Write what is left, after `run`."""
        self._guard.skip_pause()
        while self._waiting and await self._write():
            pass
        self._metrics.unlogged.inc(len(self._waiting))

    async def _write(self) -> bool:
        """Write the oldest entries; returns whether Redis took them. Entries may be written twice after a time-out."""
        entries = [self._waiting[index] for index in range(min(_PER_WRITE, len(self._waiting)))]
        try:
            await self._guard.run(lambda: self._execute(entries))
        except RedisAwayError:
            return False
        for _ in entries:
            self._waiting.popleft()
        return True

    async def _execute(self, entries: list[LoggedRequest]) -> None:
        pipe = self._guard.client.pipeline(transaction=False)
        for entry in entries:
            pipe.xadd(self._key, entry.fields(), maxlen=self._most_entries, approximate=False)
        pipe.xtrim(self._key, minid=int((time.time() - self._life_s) * 1000), approximate=True)
        pipe.expire(self._key, self._life_s)
        await pipe.execute()
