"""The coordinator's gRPC service."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable

import grpc
import grpc.aio
from opentelemetry import trace
from ryzanstein.v1 import kv_pb2, kv_pb2_grpc, worker_pb2

from services.common.tracing import remote_context, span_in
from services.kv_coordinator.hot import HotPrefix, HotPrefixes, PinLimitError, Pins
from services.kv_coordinator.index import BlockIndex
from services.kv_coordinator.metrics import CoordinatorMetrics
from services.kv_coordinator.subscriptions import Subscriptions, SyncCounters

Context = grpc.aio.ServicerContext[object, object]

# Fields of a WorkerDepth by place.
_FIELDS: dict[int, str] = {
    worker_pb2.KV_PLACE_DEVICE: "blocks",
    worker_pb2.KV_PLACE_HOST: "host_blocks",
    worker_pb2.KV_PLACE_DISK: "disk_blocks",
}


class CoordinatorService(kv_pb2_grpc.KvCoordinatorServicer):
    """`ryzanstein.v1.KvCoordinator`."""

    def __init__(
        self,
        index: BlockIndex,
        subscriptions: Subscriptions,
        counters: SyncCounters,
        hot: HotPrefixes,
        pins: Pins,
        metrics: CoordinatorMetrics,
    ) -> None:
        self._index = index
        self._subscriptions = subscriptions
        self._counters = counters
        self._hot = hot
        self._pins = pins
        self._metrics = metrics
        self._tracer = trace.get_tracer("ryzanstein.kv_coordinator")

    async def Lookup(  # noqa: N802
        self, messages: AsyncIterator[kv_pb2.LookupRequests], context: Context
    ) -> AsyncIterator[kv_pb2.LookupResponses]:
        """Answer each request with the number of leading blocks that every place of a worker holds."""
        async for message in messages:
            yield kv_pb2.LookupResponses(responses=[self._traced_lookup(request) for request in message.requests])

    def _traced_lookup(self, request: kv_pb2.LookupRequest) -> kv_pb2.LookupResponse:
        parent = remote_context([("traceparent", request.traceparent)]) if request.traceparent else None
        with span_in(self._tracer, "lookup", parent) as span:
            response = self.lookup(request)
            if span.is_recording():
                masks = [int.from_bytes(held.places, "little") for held in response.held]
                workers = {slot.worker_id for mask in masks for slot in self._index.members(mask)}
                n_workers = len(workers) or len(response.depths)
                span.set_attributes({"lookup.blocks": len(request.hashes), "lookup.workers": n_workers})
        return response

    def lookup(self, request: kv_pb2.LookupRequest) -> kv_pb2.LookupResponse:
        """Answer one request."""
        began = time.perf_counter()
        chain = list(request.hashes)  # a list is several times faster to index than a repeated field
        depths, response = self._index.depths(chain), kv_pb2.LookupResponse(tag=request.tag)
        if request.HasField("roster"):
            size = (len(self._index.slots) + 7) // 8
            for blocks, mask in depths:
                response.held.add(blocks=blocks, places=mask.to_bytes(size, "little"))
            if request.roster != self._index.version:
                response.roster.CopyFrom(self._roster())
        else:
            response.depths.extend(self._by_worker(depths))
        self._hot.count(chain)
        self._metrics.looked_up(hit=bool(depths), seconds=time.perf_counter() - began)
        return response

    def _roster(self) -> kv_pb2.Roster:
        """The places by the numbers of the index."""
        places = [
            kv_pb2.WorkerPlace(worker_id=slot.worker_id, incarnation=slot.incarnation, place=slot.place)  # type: ignore[arg-type]
            if slot
            else kv_pb2.WorkerPlace()
            for slot in self._index.slots
        ]
        return kv_pb2.Roster(version=self._index.version, places=places)

    def _by_worker(self, depths: Iterable[tuple[int, int]]) -> Iterable[kv_pb2.WorkerDepth]:
        """The answer to an older router; places of newer versions are left out."""
        by_worker: dict[str, kv_pb2.WorkerDepth] = {}
        for blocks, mask in depths:
            for slot in self._index.members(mask):
                if field := _FIELDS.get(slot.place):
                    empty = kv_pb2.WorkerDepth(worker_id=slot.worker_id, incarnation=slot.incarnation)
                    setattr(by_worker.setdefault(slot.worker_id, empty), field, blocks)
        return by_worker.values()

    async def Pin(self, request: kv_pb2.PinRequest, context: Context) -> kv_pb2.PinResponse:  # noqa: N802
        """Declare a chain hot for a time."""
        if not request.hashes:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "hashes: at least one is needed")
        now = time.monotonic()
        try:
            self._pins.pin(request.hashes[-1], now + request.ttl_s, now)
        except PinLimitError as error:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        return kv_pb2.PinResponse()

    async def Stats(self, request: kv_pb2.StatsRequest, context: Context) -> kv_pb2.StatsResponse:  # noqa: N802
        """Size, health and the hottest prefixes. Pinned prefixes come first, in addition to the requested number."""
        top = {prefix.block: prefix for prefix in self._hot.top(request.hot_prefixes)}
        pinned = [top.pop(block, HotPrefix(block, 0)) for block in self._pins.active(time.monotonic())]
        return kv_pb2.StatsResponse(
            blocks=self._index.blocks(),
            entries=self._index.entries,
            events=self._counters.events,
            gaps=self._counters.gaps,
            resyncs=self._counters.resyncs,
            workers=[
                kv_pb2.WorkerIndex(
                    worker_id=worker_id,
                    incarnation=subscription.slot.incarnation,
                    blocks=subscription.slot.blocks,
                    next_seq=subscription.next_seq,
                    synced=subscription.synced and subscription.connected,
                )
                for worker_id, subscription in self._subscriptions.by_worker.items()
            ],
            hot=[
                kv_pb2.HotPrefix(
                    hash=prefix.block,
                    lookups=prefix.lookups,
                    workers=len({slot.worker_id for slot in self._index.members(self._index.holders(prefix.block))}),
                )
                for prefix in (*pinned, *top.values())
            ],
        )
