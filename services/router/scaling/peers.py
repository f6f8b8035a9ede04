"""The demand at all routers, by model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import grpc.aio
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from services.common.router_addresses import RouterAddresses
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls
from services.router.fleet import Fleet
from services.router.scaling.arrivals import Arrivals

# A router that takes longer is left out of this sum, and no worker is removed by it.
ANSWER_S = 0.5
RESOLVE_EVERY_S = 5.0
# KEDA's calls, one or two a pool, and the scaler share an answer.
FRESH_S = 0.25

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """The demand for one model that no worker reports, at all routers."""

    requests: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    idle_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class DemandByModel:
    """Of all models; `complete`: whether every router has answered, so that there is no more."""

    models: Mapping[str, ModelDemand]
    complete: bool


class RouterPeers:
    """The other routers, found by their addresses, and this one."""

    def __init__(
        self, addresses: RouterAddresses, router_id: str, fleet: Fleet, arrivals: Arrivals, tls: Tls | None
    ) -> None:
        self._addresses = addresses
        self._router_id = router_id
        self._fleet = fleet
        self._arrivals = arrivals
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._resolve_at = 0.0
        self._silent: set[str] = set()  # addresses
        self._reading = asyncio.Lock()  # no channel is closed while a call uses it
        self._last: tuple[float, DemandByModel] | None = None  # when it was read

    async def read(self) -> DemandByModel:
        """The sum over all routers, at most `FRESH_S` old."""
        async with self._reading:
            if self._last is None or time.monotonic() - self._last[0] >= FRESH_S:
                self._last = time.monotonic(), await self._read()
            return self._last[1]

    async def _read(self) -> DemandByModel:
        await self._connect()
        answers = await asyncio.gather(*(self._ask(address) for address in self._channels))
        # By router, since one of the addresses is this router's own.
        heard = {answer.router_id: answer for answer in answers if answer is not None}
        complete = None not in answers and (not self._addresses.entries or self._router_id in heard)
        own = self._arrivals.demand(self._fleet.pools)
        return DemandByModel(_sum((heard | {own.router_id: own}).values()), complete)

    async def _ask(self, address: str) -> routing_pb2.GetDemandResponse | None:
        """The demand at a router; None if it does not answer, which is logged once per outage."""
        stub = routing_pb2_grpc.RouterStub(self._channels[address])
        try:
            answer = await stub.GetDemand(routing_pb2.GetDemandRequest(), timeout=ANSWER_S)
        except grpc.aio.AioRpcError as error:
            if address not in self._silent:
                cause = f"{error.code().name}: {error.details()}"
                log.warning("router %s does not report its demand, no worker is removed: %s", address, cause)
            self._silent.add(address)
            return None
        self._silent.discard(address)
        return answer

    async def _connect(self) -> None:
        """Have a channel to each router."""
        if time.monotonic() < self._resolve_at:
            return
        self._resolve_at = time.monotonic() + RESOLVE_EVERY_S
        current = await self._addresses.current()
        for address in self._channels.keys() - current:
            self._silent.discard(address)
            await self._channels.pop(address).close()
        for address in current:
            if address not in self._channels:
                self._channels[address] = open_channel(address, to="router", tls=self._tls, small_messages=True)

    async def close(self) -> None:
        """Close all channels."""
        async with contextlib.AsyncExitStack() as stack:
            for channel in self._channels.values():
                stack.push_async_callback(channel.close)
            self._channels = {}


def _sum(answers: Iterable[routing_pb2.GetDemandResponse]) -> dict[str, ModelDemand]:
    total: dict[str, ModelDemand] = {}
    for answer in answers:
        for more in answer.models:
            known = total.get(more.model, ModelDemand())
            total[more.model] = ModelDemand(
                requests=known.requests + more.held,
                tokens=known.tokens + more.held_tokens,
                tokens_per_s=known.tokens_per_s + more.tokens_per_s,
                idle_s=min(known.idle_s, more.idle_s),
            )
    return total
