"""Asks a KV-cache coordinator how much of a prompt each of its workers has cached."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc.aio
from opentelemetry import trace
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc

from services.common.shared_call import Lookups, share_lookups
from services.common.tracing import traceparent_of
from services.router.breaker import DEPENDENCY, Breaker
from services.router.held import HeldPrefixes, Roster


class Prefixes:
    """Look-ups at a coordinator. If it is slow or away, decisions are made without the prefixes of its workers."""

    def __init__(self, channel: grpc.aio.Channel, timeout_s: float) -> None:
        self._stub = kv_pb2_grpc.KvCoordinatorStub(channel)
        self._timeout_s = timeout_s
        self._lookups: Lookups | None = None
        self._breaker = Breaker(DEPENDENCY)
        self._roster = Roster()  # the last one that came
        self.answered = 0
        self.failed = 0

    def connect(self) -> Lookups:
        """The open call; opens it if needed. Call it ahead of requests: opening may take longer than a look-up may."""
        if self._lookups is None or self._lookups.broken:
            self._lookups = share_lookups(self._stub)
        return self._lookups

    def look_up(self, hashes: Sequence[int]) -> asyncio.Future[HeldPrefixes | None]:
        """Ask how many blocks of the chain each worker holds; None if the coordinator does not answer in time."""
        held: asyncio.Future[HeldPrefixes | None] = asyncio.get_running_loop().create_future()
        now = time.monotonic()
        if not self._breaker.allows(now):
            held.set_result(None)
            return held
        self._breaker.called(now)
        roster, span = self._roster, trace.get_current_span()
        request = kv_pb2.LookupRequest(hashes=hashes, traceparent=traceparent_of(span), roster=roster.version)
        answer = self.connect().ask(request, self._timeout_s)
        answer.add_done_callback(lambda answer: self._report(answer, roster, held))
        return held

    def _report(
        self, answer: asyncio.Future[kv_pb2.LookupResponse], roster: Roster, held: asyncio.Future[HeldPrefixes | None]
    ) -> None:
        known = answer.exception() is None
        if known:
            self.answered += 1
            self._breaker.success(time.monotonic())
        else:
            self.failed += 1
            self._breaker.fault(time.monotonic())
        if not held.done():  # else its caller has given up
            held.set_result(self._read(answer.result(), roster) if known else None)

    def _read(self, response: kv_pb2.LookupResponse, roster: Roster) -> HeldPrefixes:
        """The answer to a request that named `roster`."""
        if response.depths:
            return HeldPrefixes.by_worker(response.depths)
        if response.HasField("roster"):
            roster = self._roster = Roster(response.roster)
        return HeldPrefixes(roster, response.held)

    async def close(self) -> None:
        """Close the call to the coordinator."""
        if self._lookups is not None:
            await self._lookups.close()
