"""The worker's state for routers."""

from __future__ import annotations

from dataclasses import fields

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.card import EngineIdentity
from services.worker.engine.base import Engine, EngineState

_FIELDS = tuple(field.name for field in fields(EngineState))  # the message has fields of the same names
_ROUTERS = 64  # number of most recent routers whose dispatches are acknowledged


class StateForRouters:
    """Reports the engine's load, and the newest dispatch of each router that the load includes."""

    def __init__(self, identity: EngineIdentity, engine: Engine) -> None:
        self._identity, self._engine = identity, engine
        self._acked: dict[str, int] = {}
        self._seq = 0

    def acknowledge(self, ticket: pb.DispatchTicket) -> None:
        """Record that a router's dispatch has arrived."""
        seq = max(ticket.seq, self._acked.pop(ticket.router_id, 0))
        self._acked[ticket.router_id] = seq
        if len(self._acked) > _ROUTERS:  # a restarted router has a new id
            del self._acked[next(iter(self._acked))]

    def __call__(self) -> pb.WorkerState:
        """The current state with a new sequence number."""
        self._seq += 1
        state, counters, shared = self._engine.state(), self._engine.counters, self._identity.shared
        return pb.WorkerState(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self._seq,
            acked=self._acked,
            drafted_tokens=counters.proposed_tokens.total(),
            accepted_tokens=counters.accepted_tokens.total(),
            node=self._identity.node,
            host=shared.host,
            max_awake=shared.max_awake,
            idle_sleep_s=shared.idle_sleep_s,
            pinned=shared.pinned,
            priority=shared.priority,
            awake_bytes=sum(state.memory.values()),
            **{name: getattr(state, name) for name in _FIELDS},
        )
