"""Client of the routers: decisions, the list of workers, and reports on requests."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

import grpc
import grpc.aio
from msgspec import Struct
from opentelemetry import trace
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc, worker_pb2

from services.common.batches import MAX_BATCH
from services.common.leases import LEASE_TTL_S
from services.common.router_addresses import RouterAddresses
from services.common.rpc import open_channel
from services.common.shared_call import CallBrokenError, PeerSilentError, Routes, share_routes
from services.common.tasks import end_tasks
from services.common.tls.credentials import Tls
from services.common.tracing import traceparent_of
from services.gateway.upstream.channels import became_ready
from services.gateway.upstream.connection import WorkerRef
from services.gateway.upstream.patience import StartPatience
from services.gateway.upstream.workers import WorkerList, weight

log = logging.getLogger(__name__)

_UNKNOWN_TIMEOUT_S = 1.0  # longest wait for a router that may be down, or stopped
_RESOLVE_S = 5.0  # between two resolutions of the routers' names
_DOWN_S = 1.0  # for this long after a failure, a router is asked last
_MAX_REPORTS = 10_000  # kept while a router is away; the oldest are dropped
_LIST_TIMEOUT_S = 2.0
_PROBE_PAUSE_S = 0.25
_GONE_S = LEASE_TTL_S + 3.0  # from a worker's death until each router, and each gateway's list, has lost it
_AGAIN_S = 0.5  # pause of a request that waits for a model while no router answers
_PATIENCE_USED = 0.9  # part of its caller's time-out that a router lets a request wait
_NO_MODEL = "-"  # a model without workers, for probes


class NoWorkerError(Exception):
    """No worker can take the request; `pool_empty`: there is no worker at all."""

    def __init__(self, message: str, *, pool_empty: bool, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.pool_empty = pool_empty
        self.retry_after_s = retry_after_s


class NoRouterError(NoWorkerError):
    """No router answers, and no worker is known."""


class Assignment(Struct, frozen=True):
    """The worker that a request runs on."""

    ref: WorkerRef
    ticket: worker_pb2.DispatchTicket | None
    reason: str
    pull: worker_pb2.PullHint | None = None  # another worker holds more of the prompt's KV
    standby: worker_pb2.Standby | None = None  # the request's KV may be copied there
    trial: bool = False  # the router waits for its first token, to send the worker more


@dataclass(slots=True)
class _Endpoint:
    address: str
    channel: grpc.aio.Channel
    stub: routing_pb2_grpc.RouterAsyncStub  # made once, since it registers every method with its channel
    silent_s: float
    on_beat: Callable[[routing_pb2.RouteAnswer], None]
    down_until: float = 0.0
    probe: asyncio.Task[None] | None = None  # runs while the router is silent, until it answers
    routes: Routes | None = None
    reports: deque[routing_pb2.Outcome] = field(default_factory=lambda: deque(maxlen=_MAX_REPORTS))
    reported: asyncio.Event = field(default_factory=asyncio.Event)
    sender: asyncio.Task[None] | None = None

    @staticmethod
    def at(
        address: str,
        silent_s: float,
        tls: Tls | None,
        on_beat: Callable[[routing_pb2.RouteAnswer], None],
        group: asyncio.TaskGroup,
    ) -> _Endpoint:
        channel = open_channel(address, to="router", tls=tls, small_messages=True)
        endpoint = _Endpoint(address, channel, routing_pb2_grpc.RouterStub(channel), silent_s, on_beat)
        endpoint.sender = group.create_task(_send_reports(endpoint), name=f"reports to {address}")
        return endpoint

    def ask(self, request: routing_pb2.RouteRequest, timeout_s: float) -> asyncio.Future[routing_pb2.RouteAnswer]:
        """Ask over the call that all requests share; the future raises CallBrokenError or TimeoutError."""
        if self.routes is None or self.routes.broken:
            self.routes = Context().run(
                share_routes, self.stub, self.silent_s, self.on_beat
            )  # an empty context: the shared call must not carry the first request's trace
        traceparent = traceparent_of(trace.get_current_span())
        return self.routes.ask(routing_pb2.RouteFrame(route=request, traceparent=traceparent), timeout_s)

    @property
    def silent(self) -> bool:
        """Whether the router's heartbeats have stopped, and it has not answered since."""
        return self.probe is not None and not self.probe.done()

    def fell_silent(self) -> None:
        """Skip the router until a probe succeeds, since its connection still looks healthy."""
        if not self.silent:
            self.probe = asyncio.create_task(self._until_it_answers(), name=f"probe {self.address}")

    async def _until_it_answers(self) -> None:
        while True:
            try:
                await self.stub.ListWorkers(routing_pb2.ListWorkersRequest(model=_NO_MODEL), timeout=_LIST_TIMEOUT_S)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(_PROBE_PAUSE_S)
            else:
                log.info("router %s answers again", self.address)
                return

    async def close(self) -> None:
        """End the calls and the channel."""
        await end_tasks([task for task in (self.sender, self.probe) if task is not None])
        if self.routes is not None:
            await self.routes.close()
        await self.channel.close()


class RouterClient:
    """Asks one router, the others when it is away; decides by the last list of workers when all are away.

    All gateways ask the same router about a session, so that it may remember the session's worker.
    """

    def __init__(
        self,
        addresses: RouterAddresses,
        *,
        route_timeout_s: float,
        unknown_timeout_s: float = _UNKNOWN_TIMEOUT_S,
        tls: Tls | None = None,
    ) -> None:
        self._addresses = addresses
        self._tls = tls
        self._endpoints: list[_Endpoint] = []
        self._route_timeout_s = route_timeout_s
        self._unknown_timeout_s = unknown_timeout_s
        self.listed = WorkerList()
        self._listed_at = 0.0  # when a router was asked for it, or confirmed it, in event-loop time
        self.answered = False  # whether a router answered the last call
        self._waits: dict[str, dict[int, StartPatience]] = {}  # requests that are being routed, by model

    async def route(self, request: routing_pb2.RouteRequest, patience: StartPatience) -> Assignment:
        """Decide where a request runs; raises :class:`NoWorkerError`.

        While no router answers, it waits as it would at a router, and asks again with what is left of its patience.
        """
        clock, waits = asyncio.get_running_loop().time, self._waits.setdefault(request.model, {})
        waits[id(request)] = patience
        try:
            while True:
                now = clock()
                patience.state(request, now)
                try:
                    return await self._route(request, patience.left_s(now))
                except NoRouterError:
                    if not patience.left_s(clock()):
                        raise
                patience.tell(routing_pb2.ModelStart(model=request.model, stage="unknown"), clock())
                await asyncio.sleep(_AGAIN_S)
        finally:
            del waits[id(request)]
            if not waits:
                self._waits.pop(request.model, None)

    def _on_beat(self, beat: routing_pb2.RouteAnswer) -> None:
        """Tell the requests that wait for a model how far its start is."""
        if beat.HasField("start"):
            now = asyncio.get_running_loop().time()
            for patience in list(self._waits.get(beat.start.model, {}).values()):
                patience.tell(beat.start, now)

    async def _route(self, request: routing_pb2.RouteRequest, patience_s: float) -> Assignment:
        timeout_s = max(self._route_timeout_s, patience_s / _PATIENCE_USED + 1)
        request.timeout_ms = int(timeout_s * 1000)
        for endpoint in self._by_health(f"{request.tenant}\0{request.session}" if request.session else ""):
            if not await self._reachable(endpoint):
                continue
            try:
                answer = await endpoint.ask(request, timeout_s)
            except (CallBrokenError, TimeoutError) as error:
                if isinstance(error, PeerSilentError):
                    endpoint.fell_silent()
                self._mark_down(endpoint, repr(error))
                continue
            if answer.HasField("placed"):
                return _assignment(answer.placed)
            _raise_refusal(answer.refused)
            # A bug of the router with this request, so other requests still go to it.
            log.warning("router %s could not decide: %s", endpoint.address, answer.refused.message)
        return self._route_alone(request)

    def _route_alone(self, request: routing_pb2.RouteRequest) -> Assignment:
        key = request.session or (str(request.block_hashes[0]) if request.block_hashes else request.request_id)
        ref = self.listed.pick(request.model, key, request.excluded_workers)
        if ref is None:
            raise NoRouterError("no router answers and no worker is known", pool_empty=True)
        return Assignment(ref, None, "no router: rendezvous hashing")

    async def list_workers(self) -> WorkerList | None:
        """Refresh and return the list of all workers; None, with the old list kept, when no router answers."""
        began = asyncio.get_running_loop().time()
        answer = await self._list(routing_pb2.ListWorkersRequest(brief=True, version=self.listed.version))
        self.answered = answer is not None
        if answer is None:
            return None
        if not answer.unchanged:
            expected = self.listed.expected if answer.expected_unread else frozenset(answer.expected_models)
            self.listed = WorkerList(tuple(answer.workers), expected, answer.version)
        self._listed_at = began
        return self.listed

    async def views(self) -> Sequence[routing_pb2.WorkerView] | None:
        """All workers with their loads, as a router sees them; None when no router answers."""
        answer = await self._list(routing_pb2.ListWorkersRequest())
        return None if answer is None else answer.workers

    async def _list(self, request: routing_pb2.ListWorkersRequest) -> routing_pb2.ListWorkersResponse | None:
        for endpoint in self._by_health():
            if not await self._reachable(endpoint):
                continue
            try:
                return await endpoint.stub.ListWorkers(request, timeout=_LIST_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                self._mark_down(endpoint, error)
        return None

    async def outlives(self, ref: WorkerRef, lost_at: float) -> bool:
        """Whether a worker process lives on after its connection broke at `lost_at`, in event-loop time.

        Returns once the process is listed no more, or is listed for longer than the lease of a dead one lasts.
        """
        clock = asyncio.get_running_loop().time
        while clock() < lost_at + _GONE_S:
            if self._listed_at > lost_at and not self.listed.has(ref):
                return False
            await asyncio.sleep(_PROBE_PAUSE_S)
        return True

    def report(self, outcome: routing_pb2.Outcome) -> None:
        """Send a report on a request to every router, without waiting."""
        for endpoint in self._endpoints:
            endpoint.reports.append(outcome)
            endpoint.reported.set()

    async def follow_routers(self, every_s: float = _RESOLVE_S) -> None:
        """Add and remove routers as the addresses change, and send them reports, until cancelled."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._meet(await self._addresses.current(), group)
                await asyncio.sleep(every_s)

    async def _meet(self, addresses: Sequence[str], group: asyncio.TaskGroup) -> None:
        for endpoint in [endpoint for endpoint in self._endpoints if endpoint.address not in addresses]:
            log.info("router %s is gone", endpoint.address)
            self._endpoints.remove(endpoint)
            await endpoint.close()  # requests that wait for its answer ask the next router
        known = {endpoint.address for endpoint in self._endpoints}
        for address in addresses:
            if address not in known:
                # At a random place, so that gateways spread over the routers.
                place = random.randint(0, len(self._endpoints))
                endpoint = _Endpoint.at(address, self._unknown_timeout_s, self._tls, self._on_beat, group)
                self._endpoints.insert(place, endpoint)

    async def close(self) -> None:
        """Close all channels."""
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    def _by_health(self, session: str = "") -> list[_Endpoint]:
        """The routers in the order in which to ask them; '': a request without a session."""
        now = time.monotonic()

        def order(endpoint: _Endpoint) -> tuple[bool, bytes]:
            away = endpoint.silent or endpoint.down_until > now
            return away, weight(session, endpoint.address) if session else b""

        return sorted(self._endpoints, key=order)

    async def _reachable(self, endpoint: _Endpoint) -> bool:
        if endpoint.silent:
            return False
        if endpoint.channel.get_state() is grpc.ChannelConnectivity.READY:
            return True
        if endpoint.down_until > time.monotonic():
            return False
        if await became_ready(endpoint.channel, self._unknown_timeout_s):
            return True
        self._mark_down(endpoint, "cannot connect")
        return False

    @staticmethod
    def _mark_down(endpoint: _Endpoint, reason: object) -> None:
        if endpoint.down_until <= time.monotonic() - 10 * _DOWN_S:  # log one line per outage, not per request
            log.warning("router %s does not answer: %s", endpoint.address, reason)
        endpoint.down_until = time.monotonic() + _DOWN_S


def _assignment(answer: routing_pb2.RouteResponse) -> Assignment:
    ref = WorkerRef(answer.worker_id, answer.incarnation, answer.address)
    pull = answer.pull if answer.HasField("pull") else None
    standby = answer.standby if answer.HasField("standby") else None
    return Assignment(ref, answer.ticket, answer.decision.reason, pull, standby, answer.trial)


_BUSY = {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
_NOBODY = {grpc.StatusCode.UNAVAILABLE.value[0], grpc.StatusCode.NOT_FOUND.value[0]}


def _raise_refusal(refusal: routing_pb2.RouteRefusal) -> None:
    """Raise NoWorkerError for a router's refusal; return when the refusal is an error of the router."""
    if refusal.code in _BUSY | _NOBODY:
        retry_after_s = float(refusal.retry_after_s or 1)
        raise NoWorkerError(refusal.message, pool_empty=refusal.code in _NOBODY, retry_after_s=retry_after_s)


async def _send_reports(endpoint: _Endpoint) -> None:
    while True:
        await endpoint.reported.wait()
        call = endpoint.stub.Report()
        try:
            while True:
                await endpoint.reported.wait()
                endpoint.reported.clear()
                while some := [endpoint.reports.popleft() for _ in range(min(len(endpoint.reports), MAX_BATCH))]:
                    await call.write(routing_pb2.Outcomes(outcomes=some))
        except (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError):
            endpoint.reported.set()
            await asyncio.sleep(_DOWN_S)
        finally:
            call.cancel()
