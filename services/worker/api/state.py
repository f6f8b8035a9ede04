"""What routers need to know of this worker."""

from __future__ import annotations

import time

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.card import Identity
from services.worker.engine.loop import EngineLoop

_ROUTERS = 64  # the ones heard of last are acknowledged


class StateForRouters:
    """Says how much the engine has to do, and which dispatches that includes."""

    def __init__(self, identity: Identity, engine: EngineLoop) -> None:
        self._identity, self._engine = identity, engine
        self._acked: dict[str, int] = {}
        self._seq = 0

    def acknowledge(self, ticket: pb.DispatchTicket) -> None:
        """A request that a router has sent is here."""
        seq = max(ticket.seq, self._acked.pop(ticket.router_id, 0))
        self._acked[ticket.router_id] = seq
        if len(self._acked) > _ROUTERS:  # routers come and go under new names
            del self._acked[next(iter(self._acked))]

    def __call__(self) -> pb.WorkerState:
        """The state now, numbered."""
        self._seq += 1
        engine, meter = self._engine, self._engine.meter
        state = pb.WorkerState(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self._seq,
            phase=engine.phase,
            prefill_tokens_per_s=meter.prefill_tokens_per_s,
            decode_step_ms=meter.decode_step_ms,
            computed_tokens=meter.computed_tokens,
            acked=self._acked,
            detail=engine.detail,
            pull_bytes_per_s=engine.puller.bytes_per_s(time.monotonic()),
            kv_bytes_per_token=engine.store.bytes_per_token if engine.store else 0,
        )
        if (scheduler := engine.scheduler) is not None:
            state.queued_prefill_tokens = scheduler.queued_prefill_tokens
            state.running, state.waiting = engine.load
            state.kv_blocks_used = scheduler.pool.used
            state.kv_blocks_cached = scheduler.pool.cached
            state.kv_blocks_total = scheduler.pool.total
            state.max_request_tokens = scheduler.capacity.max_request_tokens
        return state
