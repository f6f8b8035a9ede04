"""How much of a prompt each worker has cached, by the KV-cache coordinator's word."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import grpc.aio
from opentelemetry import trace
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc

from services.common.blockhash import HASH_BLOCK_TOKENS
from services.common.tasks import end_tasks
from services.common.tracing import traceparent_of
from services.router.breaker import Breaker, BreakerLimits

_LIMITS = BreakerLimits(faults=3, window_s=10.0, open_min_s=0.5, open_max_s=5.0, probe_timeout_s=1.0)


class CachedPrefix(NamedTuple):
    """One worker's part of a prompt."""

    worker_id: str
    incarnation: str
    tokens: int


class _LookupsBrokenError(Exception):
    """The call that carried the lookups has ended."""


class _Lookups:
    """One call for many lookups: the oldest one without an answer gets the next."""

    def __init__(self, stub: kv_pb2_grpc.KvCoordinatorAsyncStub) -> None:
        self.broken = False
        self._unsent: asyncio.Queue[kv_pb2.LookupRequest] = asyncio.Queue()
        self._unanswered: deque[asyncio.Future[kv_pb2.LookupResponse]] = deque()
        self._call = stub.Lookup(self._requests())
        self._reader = asyncio.create_task(self._read(), name="lookups")

    async def ask(self, request: kv_pb2.LookupRequest) -> kv_pb2.LookupResponse:
        """The answer; raises _LookupsBrokenError when there will be none."""
        answer: asyncio.Future[kv_pb2.LookupResponse] = asyncio.get_running_loop().create_future()
        self._unanswered.append(answer)
        self._unsent.put_nowait(request)
        return await answer

    async def close(self) -> None:
        await end_tasks([self._reader])

    async def _requests(self) -> AsyncIterator[kv_pb2.LookupRequest]:
        while True:
            yield await self._unsent.get()

    async def _read(self) -> None:
        reason = "the coordinator has ended the call"
        try:
            async for response in self._call:
                answer = self._unanswered.popleft()
                if not answer.done():  # nobody waits for a late one
                    answer.set_result(response)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        finally:
            self.broken = True
            self._call.cancel()
            for answer in self._unanswered:
                if not answer.done():
                    answer.set_exception(_LookupsBrokenError(reason))


class Prefixes:
    """Asks the coordinator. Unknown means nothing cached: a slow or absent coordinator costs affinity, no more."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = kv_pb2_grpc.KvCoordinatorStub(channel)
        self._timeout_s = timeout_s
        self._lookups: _Lookups | None = None
        self._breaker = Breaker(_LIMITS)
        self.answered = 0
        self.failed = 0

    async def lookup(self, hashes: Sequence[int]) -> list[CachedPrefix]:
        """Workers that hold the beginning of the chain; empty when the coordinator does not answer in time."""
        now = time.monotonic()
        if not hashes or not self._breaker.allows(now):
            return []
        self._breaker.called(now)
        if self._lookups is None or self._lookups.broken:
            self._lookups = _Lookups(self._stub)
        request = kv_pb2.LookupRequest(hashes=hashes, traceparent=traceparent_of(trace.get_current_span()))
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._lookups.ask(request)
        except (_LookupsBrokenError, TimeoutError):
            self.failed += 1
            self._breaker.fault(time.monotonic())
            return []
        self.answered += 1
        self._breaker.success(time.monotonic())
        return [CachedPrefix(d.worker_id, d.incarnation, d.blocks * HASH_BLOCK_TOKENS) for d in response.depths]

    async def close(self) -> None:
        """End the call."""
        if self._lookups is not None:
            await self._lookups.close()
