"""The gRPC service: decodes requests, encodes decisions, turns domain errors into status codes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter as Tally
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import grpc
import grpc.aio
from opentelemetry import trace
from opentelemetry.context import Context as TraceContext
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc, worker_pb2, worker_pb2_grpc

from services.common.batches import batches
from services.common.rpc import open_channel
from services.common.tasks import end_tasks
from services.common.tls.credentials import Tls
from services.common.tracing import current_metadata, remote_context, span_in
from services.router.fleet import Fleet, UnavailableError, UnknownModelError
from services.router.messages import brief_view, explanation_message, worker_view, write_placement
from services.router.metrics import RouterMetrics
from services.router.pulls import pull_hint
from services.router.residency import Residency
from services.router.routing import OverloadedError, Placement, Routing
from services.router.scaling.arrivals import Arrivals
from services.router.settings import RouterSettings
from services.router.standbys import standby_of

# A drain lasts longer than its grace: the worker then hands its requests off.
DRAIN_EXTRA_S = 30.0
# A list of 1,000 workers takes tens of milliseconds to build; decisions run between its slices.
LIST_SLICE = 20
# While requests wait, their gateway gets a heartbeat at this interval.
HEARTBEAT_S = 0.25
_HEARTBEAT = routing_pb2.RouteAnswer()
# ListWorkers counts this many sessions, the most recent ones.
COUNTED_SESSIONS = 10_000

_REFUSALS = (UnknownModelError, UnavailableError, OverloadedError)

T = TypeVar("T")
Context = grpc.aio.ServicerContext[object, object]

log = logging.getLogger(__name__)


class RouterService(routing_pb2_grpc.RouterServicer):
    """`ryzanstein.v1.Router`."""

    def __init__(
        self,
        settings: RouterSettings,
        fleet: Fleet,
        routing: Routing,
        metrics: RouterMetrics,
        residency: Residency,
        arrivals: Arrivals,
        tls: Tls | None = None,
    ) -> None:
        self._tls = tls
        self._residency = residency
        self._arrivals = arrivals
        self._settings = settings
        self._fleet = fleet
        self._routing = routing
        self._metrics = metrics
        self._tracer = trace.get_tracer("ryzanstein.router")
        self._sessions: OrderedDict[str, str] = OrderedDict()  # the incarnation that served each last

    async def Route(self, request: routing_pb2.RouteRequest, context: Context) -> routing_pb2.RouteResponse:  # noqa: N802
        """Place one request."""
        response, parent = routing_pb2.RouteResponse(), remote_context(context.invocation_metadata())
        await self._or_abort(context, self._route(request, parent, response))
        return response

    async def RouteMany(  # noqa: N802
        self, messages: AsyncIterator[routing_pb2.RouteFrames], context: Context
    ) -> AsyncIterator[routing_pb2.RouteAnswers]:
        """Place all requests of the call. The end of the call cancels the waiting ones."""
        answers: asyncio.Queue[routing_pb2.RouteAnswer | None] = asyncio.Queue()
        answers.put_nowait(_HEARTBEAT)  # shows the gateway that this router sends heartbeats
        reader = asyncio.create_task(self._decide(messages, answers))
        try:
            async for some in batches(answers):
                yield routing_pb2.RouteAnswers(answers=some)
        finally:
            await end_tasks([reader])

    async def _decide(
        self, messages: AsyncIterator[routing_pb2.RouteFrames], answers: asyncio.Queue[routing_pb2.RouteAnswer | None]
    ) -> None:
        """Read frames and answer them, until the gateway has ended its side and has all answers."""
        deciding: dict[int, asyncio.Task[None]] = {}
        heart = asyncio.create_task(self._beat(deciding, answers))

        async def decide(frame: routing_pb2.RouteFrame) -> None:
            try:
                answers.put_nowait(await self._answer(frame))
            finally:
                deciding.pop(frame.tag, None)

        try:
            async with asyncio.TaskGroup() as group:
                async for message in messages:
                    for frame in message.frames:
                        if frame.WhichOneof("frame") == "route":
                            deciding[frame.tag] = group.create_task(decide(frame))
                        elif waiting := deciding.pop(frame.tag, None):  # it may not have begun
                            waiting.cancel()
        finally:
            heart.cancel()
            answers.put_nowait(None)

    async def _beat(
        self, deciding: dict[int, asyncio.Task[None]], answers: asyncio.Queue[routing_pb2.RouteAnswer | None]
    ) -> None:
        """Send heartbeats while requests wait, and with them how far the starts of models are."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if not deciding:
                continue
            answers.put_nowait(_HEARTBEAT)
            for model, estimate in self._routing.starting():
                start = routing_pb2.ModelStart(model=model, stage=estimate.stage, estimate_s=estimate.seconds or 0)
                answers.put_nowait(routing_pb2.RouteAnswer(start=start))

    async def _answer(self, frame: routing_pb2.RouteFrame) -> routing_pb2.RouteAnswer:
        parent = remote_context([("traceparent", frame.traceparent)]) if frame.traceparent else None
        answer = routing_pb2.RouteAnswer(tag=frame.tag)
        try:
            await self._route(frame.route, parent, answer.placed)
            return answer
        except _REFUSALS as error:
            return _refused(frame.tag, str(error), *self._refuse(error))
        except Exception as error:  # an error of one request must not end the call for the others
            log.exception("decision failed", extra={"request_id": frame.route.request_id})
            return _refused(frame.tag, repr(error), grpc.StatusCode.INTERNAL)

    async def _route(
        self, request: routing_pb2.RouteRequest, parent: TraceContext | None, response: routing_pb2.RouteResponse
    ) -> None:
        """Place a request, and write where."""
        began = time.monotonic()
        with span_in(self._tracer, "route", parent) as span:
            with self._arrivals.placing(self._fleet.known(request.model), request.prompt_tokens) as arriving:
                placed = await self._routing.route(request)
                arriving.placed(request.prompt_tokens - placed.choice.chosen.matched_tokens, time.monotonic())
            self._write(response, request, placed)
            if span.is_recording():
                span.set_attributes(_attributes(request, response.decision))
        keep_alive_s = request.keep_alive_s if request.HasField("keep_alive_s") else None
        self._residency.placed(placed.binding.worker_id, keep_alive_s)
        self._metrics.placed(placed, time.monotonic() - began)
        if request.session:
            self._count_session(f"{request.tenant}\0{request.session}", placed.binding.incarnation)

    def _write(self, response: routing_pb2.RouteResponse, request: routing_pb2.RouteRequest, placed: Placement) -> None:
        response.worker_id, response.incarnation = placed.binding.worker_id, placed.binding.incarnation
        response.address = placed.member.address
        response.ticket.router_id, response.ticket.seq = self._settings.router_id, placed.seq
        response.trial = placed.evaluation.pool.breakers.on_trial(placed.member)
        write_placement(response.decision, placed, self._routing.policy.name)
        if pull := pull_hint(placed.evaluation.pool, placed.evaluation.snapshot, placed.choice):
            response.pull.CopyFrom(pull)
        if standby := standby_of(request, placed):
            response.standby.CopyFrom(standby)

    async def Explain(self, request: routing_pb2.RouteRequest, context: Context) -> routing_pb2.Decision:  # noqa: N802
        """Estimates of every candidate, without any effect."""
        evaluation = await self._or_abort(context, self._routing.explain(request))
        return explanation_message(evaluation, self._routing.policy)

    async def Report(  # noqa: N802
        self, messages: AsyncIterator[routing_pb2.Outcomes], context: Context
    ) -> routing_pb2.ReportResponse:
        """Take outcomes of requests, for the circuit breakers."""
        async for message in messages:
            for outcome in message.outcomes:
                self._metrics.reported(outcome)
                self._fleet.report(outcome)
        return routing_pb2.ReportResponse()

    async def ListWorkers(  # noqa: N802
        self, request: routing_pb2.ListWorkersRequest, context: Context
    ) -> routing_pb2.ListWorkersResponse:
        """List all workers of a model, or of every model; a brief list only if the caller has another version."""
        now = time.monotonic()
        response = routing_pb2.ListWorkersResponse(
            router_id=self._settings.router_id,
            policy=self._routing.policy.name,
            version=self._fleet.version(now),  # a change while the list is built makes the next one another
        )
        if request.brief and request.version == response.version:
            response.unchanged = True
            return response
        response.expected_models.extend(sorted(self._fleet.expected or ()))
        response.expected_unread = self._fleet.expected is None
        sessions = Tally(self._sessions.values())
        for pool in [pool for model, pool in self._fleet.pools.items() if request.model in ("", model)]:
            verdicts = pool.snapshot().why_not.tolist()
            for i, (member, why_not) in enumerate(zip(list(pool.members.values()), verdicts, strict=True)):
                if i % LIST_SLICE == LIST_SLICE - 1:
                    await asyncio.sleep(0)
                if pool.members.get(member.worker_id) is not member:
                    continue  # the worker left during a sleep
                response.workers.append(
                    brief_view(pool, member, now)
                    if request.brief
                    else worker_view(pool, member, why_not, sessions[member.incarnation], now)
                )
        return response

    async def GetDemand(  # noqa: N802
        self, request: routing_pb2.GetDemandRequest, context: Context
    ) -> routing_pb2.GetDemandResponse:
        """The requests of this router that no worker reports, by model."""
        return self._arrivals.demand(self._fleet.pools)

    async def DrainWorker(  # noqa: N802
        self, request: routing_pb2.DrainWorkerRequest, context: Context
    ) -> worker_pb2.DrainResponse:
        """Send no more requests to a worker, and ask it to hand its requests off."""
        place = self._fleet.find(request.worker_id)
        if place is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"worker_id: {request.worker_id!r} is not known")
        pool, member = place
        pool.set_draining(request.worker_id, True)
        try:
            async with open_channel(member.address, to="worker", tls=self._tls) as channel:
                return await worker_pb2_grpc.WorkerStub(channel).Drain(
                    worker_pb2.DrainRequest(grace_ms=request.grace_ms),
                    timeout=request.grace_ms / 1000 + DRAIN_EXTRA_S,
                    metadata=current_metadata(),
                )
        except grpc.aio.AioRpcError as error:
            if request.worker_id in pool.members:
                pool.set_draining(request.worker_id, False)
            await context.abort(error.code(), f"worker {request.worker_id} did not drain: {error.details()}")

    async def _or_abort(self, context: Context, decision: Awaitable[T]) -> T:
        try:
            return await decision
        except _REFUSALS as error:
            code, retry_after_s = self._refuse(error)
            metadata = (("retry-after", str(retry_after_s)),) if retry_after_s else ()
            await context.abort(code, str(error), trailing_metadata=metadata)

    def _refuse(self, error: Exception) -> tuple[grpc.StatusCode, int]:
        """Count a refusal; return its status, and after how many seconds to retry (0: unknown)."""
        match error:
            case OverloadedError():
                code, retry_after_s = grpc.StatusCode.RESOURCE_EXHAUSTED, error.retry_after_s
            case UnavailableError():
                code, retry_after_s = grpc.StatusCode.UNAVAILABLE, error.retry_after_s
            case _:
                code, retry_after_s = grpc.StatusCode.NOT_FOUND, 0
        self._metrics.refusals.labels(code.name.lower()).inc()
        return code, retry_after_s

    def _count_session(self, session: str, incarnation: str) -> None:
        self._sessions[session] = incarnation
        self._sessions.move_to_end(session)
        if len(self._sessions) > COUNTED_SESSIONS:
            self._sessions.popitem(last=False)


def _refused(tag: int, message: str, code: grpc.StatusCode, retry_after_s: int = 0) -> routing_pb2.RouteAnswer:
    refusal = routing_pb2.RouteRefusal(code=code.value[0], message=message, retry_after_s=retry_after_s)
    return routing_pb2.RouteAnswer(tag=tag, refused=refusal)


def _attributes(request: routing_pb2.RouteRequest, decision: routing_pb2.Decision) -> dict[str, str | int | float]:
    """The chosen worker's estimates, as attributes of the span."""
    attributes: dict[str, str | int | float] = {
        "ryzanstein.generation_id": request.request_id,
        "request.attempt": request.attempt,
        "route.policy": decision.policy,
        "route.reason": decision.reason,
        "route.worker": decision.worker_id,
        "route.queue_ms": decision.queue_ms,
    }
    for chosen in decision.candidates:
        attributes |= {
            "route.queued_tokens": chosen.queued_tokens,
            "route.matched_tokens": chosen.matched_tokens,
            "route.ttft_ms": chosen.ttft_ms,
            "route.itl_ms": chosen.itl_ms,
            "route.cost_ms": chosen.cost_ms,
        }
    return attributes
