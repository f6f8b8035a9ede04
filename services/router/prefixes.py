"""How much of a prompt each worker has cached, by the KV-cache coordinator's word."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc.aio
from opentelemetry import trace
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc

from services.common.shared_call import CallBrokenError, Lookups, share_lookups
from services.common.tracing import traceparent_of
from services.router.breaker import DEPENDENCY, Breaker


class Prefixes:
    """Asks the coordinator. A slow or absent one costs its time-out, and then what is known of prefixes."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = kv_pb2_grpc.KvCoordinatorStub(channel)
        self._timeout_s = timeout_s
        self._lookups: Lookups | None = None
        self._breaker = Breaker(DEPENDENCY)
        self.answered = 0
        self.failed = 0

    async def lookup(self, hashes: Sequence[int]) -> Sequence[kv_pb2.WorkerDepth] | None:
        """How many blocks of the chain workers hold; None when the coordinator does not answer in time."""
        now = time.monotonic()
        if not self._breaker.allows(now):
            return None
        self._breaker.called(now)
        if self._lookups is None or self._lookups.broken:
            self._lookups = share_lookups(self._stub)
        request = kv_pb2.LookupRequest(hashes=hashes, traceparent=traceparent_of(trace.get_current_span()))
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._lookups.ask(request)
        except (CallBrokenError, TimeoutError):
            self.failed += 1
            self._breaker.fault(time.monotonic())
            return None
        self.answered += 1
        self._breaker.success(time.monotonic())
        return response.depths

    async def close(self) -> None:
        """End the call."""
        if self._lookups is not None:
            await self._lookups.close()
