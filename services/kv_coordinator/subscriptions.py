"""Keeps the index in step with every worker's KV events."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio
from ryzanstein.v1 import worker_pb2, worker_pb2_grpc

from services.common.leases import Lease
from services.common.rpc import open_channel
from services.common.tls.credentials import Tls
from services.kv_coordinator.index import BlockIndex, Slot

RECONNECT_MIN_S, RECONNECT_MAX_S = 0.05, 1.0
# Blocks applied before the event loop gets a turn: about a millisecond. A full dump of a worker has 100,000.
SLICE_BLOCKS = 2_000

log = logging.getLogger(__name__)


class ResyncNeeded(Exception):  # noqa: N818  # part of the protocol
    """Events do not continue the known state."""


@dataclass(slots=True)
class SyncCounters:
    """Totals since the start."""

    events: int = 0
    gaps: int = 0
    resyncs: int = 0


@dataclass(slots=True)
class Subscription:
    """One worker's slots in the index, and the next event that it expects."""

    slot: Slot  # the device's
    next_seq: int = 0
    below: dict[int, Slot] = field(default_factory=dict)  # by place below the device
    synced: bool = False
    connected: bool = False
    behind_since: float = field(default_factory=time.monotonic)  # when it was last in step, or was created

    @property
    def in_step(self) -> bool:
        """Whether the index has all of the worker's events, and its stream is open."""
        return self.synced and self.connected


class Subscriptions:
    """Follows every worker. A block whose state is uncertain counts as not held."""

    def __init__(self, index: BlockIndex, counters: SyncCounters, tls: Tls | None = None) -> None:
        self._tls = tls
        self._index = index
        self._counters = counters
        self.by_worker: dict[str, Subscription] = {}

    async def follow(self, lease: Lease) -> None:
        """Apply a worker's events until cancelled."""
        self.by_worker[lease.worker_id] = Subscription(self._index.open_slot(lease.worker_id, ""))
        pause = RECONNECT_MIN_S
        async with open_channel(lease.address, to="worker", tls=self._tls) as channel:
            while True:
                if await self._subscribe(lease, channel):
                    pause = RECONNECT_MIN_S
                await asyncio.sleep(pause)
                pause = min(2 * pause, RECONNECT_MAX_S)

    def lost(self, worker_id: str) -> None:
        """Remove a worker that is gone."""
        if subscription := self.by_worker.pop(worker_id, None):
            self._index.close_slot(subscription.slot)
            self._close_below(subscription)

    def lag_s(self) -> float:
        """The longest time that any worker has been out of step; 0 if none is."""
        behind = [each.behind_since for each in self.by_worker.values() if not each.in_step]
        return time.monotonic() - min(behind) if behind else 0.0

    def connected(self, worker_id: str) -> bool:
        """Whether the worker's event stream is open."""
        subscription = self.by_worker.get(worker_id)
        return subscription is not None and subscription.connected

    async def _subscribe(self, lease: Lease, channel: grpc.aio.Channel) -> bool:
        """Apply events until the stream breaks or has a gap; return whether the worker was connected and synced."""
        subscription = self.by_worker[lease.worker_id]
        request = worker_pb2.KvSyncRequest(
            incarnation=subscription.slot.incarnation, next_seq=subscription.next_seq if subscription.synced else 0
        )
        was_in_step = False
        try:
            async for batch in worker_pb2_grpc.WorkerStub(channel).KvSync(request):
                subscription.connected = True
                await self._apply(lease, subscription, batch)
                was_in_step = True
        except grpc.aio.AioRpcError as error:
            log.debug("event stream of %s broken: %s", lease.worker_id, error.details())
        except ResyncNeeded as error:
            log.warning("resync of %s: %s", lease.worker_id, error, extra={"worker_id": lease.worker_id})
            self._counters.gaps += 1
            self._restart(subscription, "")
        heard, subscription.connected = subscription.connected, False
        if was_in_step:
            subscription.behind_since = time.monotonic()
        return heard and subscription.synced

    async def _apply(self, lease: Lease, subscription: Subscription, batch: worker_pb2.KvEvents) -> None:
        if batch.worker_id != lease.worker_id:
            raise ResyncNeeded(f"{lease.address} answers as worker {batch.worker_id}")
        events: Sequence[worker_pb2.KvEvent] = batch.events
        if batch.reset:
            self._counters.resyncs += 1
            self._restart(subscription, batch.incarnation)
            subscription.next_seq = batch.first_seq
            subscription.synced = True
        elif batch.incarnation != subscription.slot.incarnation:
            raise ResyncNeeded("another incarnation without a reset")
        elif batch.first_seq > subscription.next_seq:
            raise ResyncNeeded(f"events {subscription.next_seq} to {batch.first_seq - 1} are missing")
        else:
            events = events[subscription.next_seq - batch.first_seq :]  # a replay may overlap
        for event in events:
            await self._apply_event(subscription, event)
            subscription.next_seq += 1
            self._counters.events += 1

    async def _apply_event(self, subscription: Subscription, event: worker_pb2.KvEvent) -> None:
        if event.cleared:
            self._renew(subscription, subscription.slot.incarnation)
        await self._change(subscription.slot, event.removed, event.stored)
        if event.place:
            slot = subscription.below.get(event.place)
            if slot is None:
                device = subscription.slot
                slot = self._index.open_slot(device.worker_id, device.incarnation, event.place)
                subscription.below[event.place] = slot
            await self._change(slot, event.dropped, event.offloaded)

    async def _change(self, slot: Slot, removed: Sequence[int], stored: Sequence[int]) -> None:
        for part in _sliced(removed):
            self._index.remove(slot, part)
            if len(part) == SLICE_BLOCKS:
                await asyncio.sleep(0)
        for part in _sliced(stored):
            self._index.store(slot, part)
            if len(part) == SLICE_BLOCKS:
                await asyncio.sleep(0)

    def _restart(self, subscription: Subscription, incarnation: str) -> None:
        """Forget a worker's blocks in all places, and expect a dump."""
        self._renew(subscription, incarnation)
        self._close_below(subscription)
        subscription.next_seq, subscription.synced = 0, False

    def _renew(self, subscription: Subscription, incarnation: str) -> None:
        """Forget the device's blocks: closing its slot clears one bit for look-ups, a later sweep frees the memory."""
        if subscription.slot.blocks or subscription.slot.incarnation != incarnation:
            self._index.close_slot(subscription.slot)
            subscription.slot = self._index.open_slot(subscription.slot.worker_id, incarnation)

    def _close_below(self, subscription: Subscription) -> None:
        for slot in subscription.below.values():
            self._index.close_slot(slot)
        subscription.below.clear()


def _sliced(blocks: Sequence[int]) -> list[Sequence[int]]:
    if len(blocks) <= SLICE_BLOCKS:
        return [blocks] if blocks else []
    return [blocks[start : start + SLICE_BLOCKS] for start in range(0, len(blocks), SLICE_BLOCKS)]
