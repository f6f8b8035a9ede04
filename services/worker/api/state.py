"""What routers need to know of this worker."""

from __future__ import annotations

from dataclasses import fields

from ryzanstein.v1 import worker_pb2 as pb

from services.worker.api.card import Identity
from services.worker.engine.base import Engine, EngineState

_FIELDS = tuple(field.name for field in fields(EngineState))  # the message calls them so, too
_ROUTERS = 64  # the ones heard of last are acknowledged


class StateForRouters:
    """Says how much the engine has to do, and which dispatches that includes."""

    def __init__(self, identity: Identity, engine: Engine) -> None:
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
        state = self._engine.state()
        return pb.WorkerState(
            worker_id=self._identity.worker_id,
            incarnation=self._identity.incarnation,
            seq=self._seq,
            acked=self._acked,
            **{name: getattr(state, name) for name in _FIELDS},
        )
