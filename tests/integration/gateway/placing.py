"""A real gRPC router in the test process, which places requests on the workers of :mod:`fleet` in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
import grpc.aio
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc, worker_pb2

from services.common.batches import batches
from services.common.ports import free_port
from services.common.rpc import bind, new_server
from services.common.tls.credentials import Tls
from tests.integration.gateway.fleet import Worker

FULL_S = 1.5  # wait of a request for a model in `full`


@dataclass
class PlacingRouter(routing_pb2_grpc.RouterServicer):
    """Places requests on its workers in turn."""

    workers: list[Worker]
    busy: bool = False
    places: int = 0  # requests that run at once; 0: any number
    retry_after_s: int = 7
    mistaken: bool = False
    empty: bool = False
    queue_s: float = 0.0  # how long requests wait for a worker of their model
    queued: int = 0

    def __post_init__(self) -> None:
        self.routes: list[routing_pb2.RouteRequest] = []
        self.traceparents: list[str] = []  # trace contexts of the Route calls
        self.outcomes: list[routing_pb2.Outcome] = []
        self.hidden: set[str] = set()  # not listed, not chosen
        self.away: set[str] = set()  # listed still, not chosen any more
        self.full: set[str] = set()  # models whose workers are all busy, for as long as requests wait in the queue
        self.expected: list[str] = []  # models that are known without a worker
        self.phases: dict[str, worker_pb2.Phase] = {}  # by worker id, where a worker does not serve
        self.pull: worker_pb2.PullHint | None = None
        self.standby: worker_pb2.Standby | None = None
        self.trial = False
        self.port = free_port()
        self._turn = 0
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self, tls: Tls | None = None) -> None:
        self._server = new_server(tls=tls)
        routing_pb2_grpc.add_RouterServicer_to_server(self, self._server)
        bind(self._server, "127.0.0.1", self.port, tls)
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    async def RouteMany(self, messages, context):  # noqa: N802
        answers: asyncio.Queue[routing_pb2.RouteAnswer | None] = asyncio.Queue()

        async def decide(frame: routing_pb2.RouteFrame) -> None:
            answers.put_nowait(await self._answer(frame))

        async def read() -> None:
            async with asyncio.TaskGroup() as group:
                async for message in messages:
                    for frame in (frame for frame in message.frames if frame.HasField("route")):
                        group.create_task(decide(frame))

        reader = asyncio.create_task(read())
        try:
            async for batch in batches(answers):  # as a router does: what waits travels together
                yield routing_pb2.RouteAnswers(answers=batch)
        finally:
            reader.cancel()

    async def _answer(self, frame: routing_pb2.RouteFrame) -> routing_pb2.RouteAnswer:
        self.traceparents.append(frame.traceparent)
        if self.queue_s:
            await self._queue(frame.route)
        if frame.route.model in self.full:
            await asyncio.sleep(FULL_S)
        answer = self._route(frame.route)
        field = "placed" if isinstance(answer, routing_pb2.RouteResponse) else "refused"
        return routing_pb2.RouteAnswer(tag=frame.tag, **{field: answer})

    async def _queue(self, request: routing_pb2.RouteRequest) -> None:
        """Until somebody serves the model, or the time is over."""
        self.queued += 1
        patience_s = request.patience_ms / 1000 if request.HasField("patience_ms") else self.queue_s

        def served() -> bool:
            present = (worker for worker in self.workers if worker.worker_id not in self.away)
            return any(self._serves(worker, request.model) for worker in present)

        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(self.queue_s, patience_s)):
                while not served():  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        self.queued -= 1

    def _serves(self, worker: Worker, model: str) -> bool:
        return worker.model == model and worker.worker_id not in self.hidden and not worker.loading

    def _route(self, request: routing_pb2.RouteRequest) -> routing_pb2.RouteResponse | routing_pb2.RouteRefusal:
        self.routes.append(request)
        if self.mistaken:
            return _refusal(grpc.StatusCode.INTERNAL, "a mistake of the router")
        if self.busy or request.model in self.full or (self.places and self._turn - len(self.outcomes) >= self.places):
            return _refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, "no worker became free in time", self.retry_after_s)
        able = [
            w
            for w in self.workers
            if self._serves(w, request.model) and w.worker_id not in self.away.union(request.excluded_workers)
        ]
        if self.empty or not able:
            return _refusal(grpc.StatusCode.UNAVAILABLE, "the pool is empty")
        self._turn += 1
        chosen = able[self._turn % len(able)]
        return routing_pb2.RouteResponse(
            worker_id=chosen.worker_id,
            incarnation=chosen.incarnation,
            address=chosen.address,
            ticket=worker_pb2.DispatchTicket(router_id="r", seq=self._turn),
            pull=self.pull,
            standby=self.standby,
            trial=self.trial,
        )

    async def Report(self, request_iterator, context):  # noqa: N802
        async for message in request_iterator:
            self.outcomes.extend(message.outcomes)
        return routing_pb2.ReportResponse()

    async def ListWorkers(self, request, context):  # noqa: N802
        views = [
            routing_pb2.WorkerView(
                worker_id=w.worker_id,
                address=w.address,
                model=w.model,
                state=worker_pb2.WorkerState(
                    worker_id=w.worker_id,
                    incarnation=w.incarnation,
                    phase=self.phases.get(
                        w.worker_id, worker_pb2.PHASE_LOADING if w.loading else worker_pb2.PHASE_SERVING
                    ),
                ),
                eligible=True,
            )
            for w in self.workers
            if w.worker_id not in self.hidden
        ]
        names = {"router_id": "r", "policy": "round_robin", "expected_models": self.expected}
        return routing_pb2.ListWorkersResponse(workers=views, **names)


def _refusal(code: grpc.StatusCode, message: str, retry_after_s: int = 0) -> routing_pb2.RouteRefusal:
    return routing_pb2.RouteRefusal(code=code.value[0], message=message, retry_after_s=retry_after_s)


@asynccontextmanager
async def running_fleet(workers: Sequence[Worker]) -> AsyncIterator[PlacingRouter]:
    """Workers and their router."""
    router = PlacingRouter(list(workers))
    async with contextlib.AsyncExitStack() as stack:
        for server in [*workers, router]:
            await server.start()
            stack.push_async_callback(server.stop)
        yield router
