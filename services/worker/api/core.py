"""What this worker is and does right now: its phase, its engine, its gateways, its state for routers."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Span
from ryzanstein.v1 import worker_pb2 as pb

from services.common.tracing import remote_context
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.stream_buffer import RunningRequest, StreamBuffer
from services.worker.api.submits import InvalidSubmitError, ModelLimits, to_request
from services.worker.engine.changes import Changes
from services.worker.engine.loop import Engine
from services.worker.engine.step_cost import Meter
from services.worker.kv_transfer.puller import Puller
from services.worker.kv_transfer.source import BlockSource
from services.worker.kv_transfer.store import KvStore
from services.worker.scheduling.admission import TooLongError
from services.worker.scheduling.config import Counters
from services.worker.scheduling.kv_events import KvEventLog
from services.worker.scheduling.request import Request

log = logging.getLogger(__name__)

_ROUTERS = 64  # the ones heard of last are acknowledged

_REFUSALS = {
    pb.PHASE_LOADING: (pb.Handoff.REASON_LOADING, "the worker is still loading its model"),
    # Not RANKS_LOST: this request was not touched by the loss and says nothing about its cause.
    pb.PHASE_RECOVERING: (pb.Handoff.REASON_LOADING, "the worker is restarting its ranks"),
    pb.PHASE_DRAINING: (pb.Handoff.REASON_DRAIN, "the worker is draining"),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this process is."""

    worker_id: str
    incarnation: str  # a UUID per process start
    model: str


class WorkerCore:
    """The one mutable object of the server; everything else reads it or asks it. Lives on the event loop."""

    def __init__(self, identity: Identity, max_waiting: int, puller: Puller, life: LifeMetrics) -> None:
        self.identity = identity
        self.life = life
        self._max_waiting = max_waiting
        self.phase: pb.Phase = pb.PHASE_LOADING
        self.detail = "loading the model"
        self.changes = Changes()
        self.kv_log = KvEventLog()
        self.counters = Counters()
        self.meter = Meter()
        self.puller = puller
        self.source = BlockSource(identity.incarnation, lambda: self._store)
        self.card: pb.ModelCard | None = None  # needs the ranks' own words
        self._store: KvStore | None = None  # of the ranks that serve
        self._limits: ModelLimits | None = None
        self.closed = False  # streams end once they are empty
        self._tracer = trace.get_tracer("ryzanstein.worker")
        self._acked: dict[str, int] = {}
        self._buffers: set[StreamBuffer] = set()
        self._seq = 0

    @property
    def serving(self) -> bool:
        """Whether requests are taken on."""
        return self.phase == pb.PHASE_SERVING

    @property
    def _engine(self) -> Engine | None:
        return self._store.engine if self._store else None

    @property
    def phase_name(self) -> str:
        """The phase in lower case, for people and leases."""
        return pb.Phase.Name(self.phase).removeprefix("PHASE_").lower()

    # -- phases ----------------------------------------------------------------------------------------------

    def serve(self, store: KvStore, limits: ModelLimits, card: pb.ModelCard) -> None:
        """Ranks are up: take requests."""
        self._store, self._limits, self.card = store, limits, card
        self._enter(pb.PHASE_SERVING, "")

    def lose(self, detail: str) -> None:
        """The ranks that served are gone: hand everything off at once."""
        assert self._store is not None
        for served, in_flight in self._store.engine.lose():
            self._hand_off(served, pb.Handoff.REASON_RANKS_LOST, detail, in_flight=in_flight)
        self._store = None
        self.recover(detail)

    def recover(self, detail: str) -> None:
        """Say what is known of the loss, and of attempts to start the ranks again."""
        self._enter(pb.PHASE_RECOVERING, detail)

    async def drain(self, grace_s: float) -> tuple[int, int]:
        """Take nothing new, let running requests go on for `grace_s`; returns how many were handed off, completed."""
        self._enter(pb.PHASE_DRAINING, "draining")
        self.life.drains()
        engine = self._engine
        if engine is None:
            return 0, 0
        handed_off = self._hand_off_all(engine.release(waiting_only=grace_s > 0))
        running = engine.n_requests
        with self.changes.watch() as changed:
            try:
                async with asyncio.timeout(grace_s):
                    while engine.n_requests:
                        await changed.wait()
                        changed.clear()
            except TimeoutError:
                log.info("the grace period is over")
        left = self._hand_off_all(engine.release())
        return handed_off + left, running - left

    def close(self) -> None:
        """Let every stream end after what it still has to tell."""
        self.closed = True
        for buffer in self._buffers:
            buffer.wake()
        self.changes.announce()

    def _enter(self, phase: pb.Phase, detail: str) -> None:
        if self.phase == pb.PHASE_DRAINING:  # there is no way back: the process is about to end
            phase = pb.PHASE_DRAINING
        self.phase, self.detail = phase, detail
        log.info("phase %s", self.phase_name, extra={"detail": detail})
        self.changes.announce()

    # -- requests --------------------------------------------------------------------------------------------

    def connect(self) -> StreamBuffer:
        """A gateway opened its stream."""
        buffer = StreamBuffer()
        self._buffers.add(buffer)
        return buffer

    def submit(self, buffer: StreamBuffer, submit: pb.Submit) -> None:
        """Take a request on, or answer at once why not."""
        if submit.HasField("ticket"):
            self._acknowledge(submit.ticket)
        served = RunningRequest(buffer, submit.request_id, submit.attempt, self._span(submit))
        if self.phase != pb.PHASE_SERVING or self._engine is None or self._limits is None:
            self._hand_off(served, *_REFUSALS[self.phase])
            self.changes.announce()
            return
        if self._engine.n_waiting >= self._max_waiting:
            self._hand_off(served, pb.Handoff.REASON_OVERLOAD, f"{self._max_waiting} requests are waiting")
            return
        self.cancel(buffer, submit.request_id)  # a gateway that submits again has given the earlier attempt up
        try:
            self._take_on(to_request(submit, self._limits), submit, served)
        except InvalidSubmitError as error:
            self._refuse(served, pb.RequestError.CODE_INVALID_ARGUMENT, error.field, str(error))
        except TooLongError as error:
            self._refuse(served, pb.RequestError.CODE_TOO_LONG, error.field, str(error))
        self.changes.announce()

    def _take_on(self, request: Request, submit: pb.Submit, served: RunningRequest) -> None:
        assert self._store is not None
        pull = submit.HasField("pull") and request.reads_cache
        self._store.engine.submit(request, served, parked=pull)
        if pull:
            self.puller.start(self._store, request, submit.pull, self.meter.prefill_tokens_per_s)

    def _acknowledge(self, ticket: pb.DispatchTicket) -> None:
        seq = max(ticket.seq, self._acked.pop(ticket.router_id, 0))
        self._acked[ticket.router_id] = seq
        if len(self._acked) > _ROUTERS:  # routers come and go under new names
            del self._acked[next(iter(self._acked))]

    def _span(self, submit: pb.Submit) -> Span:
        """The worker's part of the request's trace; costs nothing while tracing is off."""
        return self._tracer.start_span(
            "worker.request",
            context=remote_context((("traceparent", submit.traceparent),)) if submit.traceparent else None,
            attributes={
                "ryzanstein.generation_id": submit.request_id,
                "ryzanstein.attempt": submit.attempt,
                "ryzanstein.prompt_tokens": len(submit.prompt_ids),
            },
        )

    def cancel(self, buffer: StreamBuffer, request_id: str) -> None:
        """Forget a request; an unknown one has ended already."""
        request = buffer.live.get(request_id)
        if request is not None and self._engine is not None:
            self._engine.cancel(request)

    def drop(self, buffer: StreamBuffer) -> None:
        """A gateway's stream is over: so are its requests."""
        if buffer.live:
            log.info("stream of gateway %s ended, %d requests cancelled", buffer.gateway_id, len(buffer.live))
        for request_id in list(buffer.live):
            self.cancel(buffer, request_id)
        self._buffers.discard(buffer)

    def _hand_off_all(self, chosen: list[RunningRequest]) -> int:
        for served in chosen:
            self._hand_off(served, *_REFUSALS[pb.PHASE_DRAINING])
        return len(chosen)

    def _hand_off(
        self, served: RunningRequest, reason: pb.Handoff.Reason, detail: str, *, in_flight: bool = False
    ) -> None:
        self.life.handed_off(reason)
        served.buffer.hand_off(served, reason, detail, in_flight=in_flight)
        served.buffer.flush(0)

    def _refuse(self, served: RunningRequest, code: pb.RequestError.Code, field: str, message: str) -> None:
        served.buffer.refuse(served, pb.RequestError(code=code, field=field, message=message))
        served.buffer.flush(0)

    # -- state -----------------------------------------------------------------------------------------------

    def state(self) -> pb.WorkerState:
        """What routers need to know."""
        self._seq += 1
        state = pb.WorkerState(
            worker_id=self.identity.worker_id,
            incarnation=self.identity.incarnation,
            seq=self._seq,
            phase=self.phase,
            prefill_tokens_per_s=self.meter.prefill_tokens_per_s,
            decode_step_ms=self.meter.decode_step_ms,
            computed_tokens=self.meter.computed_tokens,
            acked=self._acked,
            detail=self.detail,
            pull_bytes_per_s=self.puller.bytes_per_s(time.monotonic()),
            kv_bytes_per_token=self._store.bytes_per_token if self._store else 0,
        )
        if self._engine is not None:
            scheduler = self._engine.scheduler
            state.queued_prefill_tokens = scheduler.queued_prefill_tokens
            state.running, state.waiting = scheduler.n_running, scheduler.n_waiting
            state.kv_blocks_used = scheduler.pool.used
            state.kv_blocks_cached = scheduler.pool.cached
            state.kv_blocks_total = scheduler.pool.total
            state.max_request_tokens = scheduler.capacity.max_request_tokens
        return state

    def kv_hashes(self) -> list[int]:
        """Wire hashes of everything in the prefix cache, parents before children."""
        return self._engine.scheduler.pool.hashes() if self._engine is not None else []
