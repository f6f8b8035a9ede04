"""Who belongs to a pool, and whether its state allows it requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import worker_pb2

from services.router.snapshot import Hashes, IneligibleReason, hash64

# One that has missed two moments at which it had to speak is stopped or cut off; by default that is every two seconds.
SILENT_BEATS, SILENT_S = 2.5, 5.0

_PHASES = {
    worker_pb2.PHASE_SERVING: IneligibleReason.ELIGIBLE,
    worker_pb2.PHASE_RECOVERING: IneligibleReason.RECOVERING,
    worker_pb2.PHASE_DRAINING: IneligibleReason.DRAINING,
}
_LAST_SEEN, _SILENT_S = range(2)  # rows of the table; the last: silent for longer, it is taken to be stopped


@dataclass(slots=True, eq=False)
class Member:
    """One worker. `index` is its place in all arrays of its pool."""

    worker_id: str
    address: str
    index: int
    identity: int  # hash64 of the worker id
    verdict: IneligibleReason = IneligibleReason.DISCONNECTED  # as far as its state tells
    state: worker_pb2.WorkerState = field(default_factory=worker_pb2.WorkerState)
    incarnation: str = ""
    connected: bool = False
    draining: bool = False  # asked to by this router: do not wait until the worker says so


class Membership:
    """The members of a pool in the order of its arrays. Times come from the pool's clock, in seconds."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.ids: tuple[str, ...] = ()
        self.identities: Hashes = np.zeros(0, dtype=np.uint64)
        self._table = np.zeros((2, 0))  # [rows, n_workers]
        self._verdicts = np.zeros(0, dtype=np.uint8)
        self._nobody_silent_until = 0.0  # nobody can be silent before this moment

    def join(self, worker_id: str, address: str) -> Member:
        """A worker comes, not connected yet."""
        member = self.members[worker_id] = Member(worker_id, address, len(self.ids), hash64(worker_id))
        self._table = np.concatenate([self._table, np.array([[0.0], [SILENT_S]])], axis=1)
        self._verdicts = np.append(self._verdicts, np.uint8(IneligibleReason.DISCONNECTED))
        self._renumber()
        return member

    def leave(self, worker_id: str) -> Member:
        """A worker goes; those behind it move up."""
        member = self.members.pop(worker_id)
        self._table = np.delete(self._table, member.index, axis=1)
        self._verdicts = np.delete(self._verdicts, member.index)
        self._renumber()
        return member

    def _renumber(self) -> None:
        self._nobody_silent_until = 0.0
        self.ids = tuple(self.members)
        self.identities = np.array([member.identity for member in self.members.values()], dtype=np.uint64)
        for index, member in enumerate(self.members.values()):
            member.index = index

    def incarnate(self, worker_id: str, incarnation: str) -> Member | None:
        """The worker, if that is its process now."""
        member = self.members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def on_state(self, member: Member, state: worker_pb2.WorkerState, now: float) -> None:
        """Take its newest state. A new process need not drain."""
        if state.incarnation != member.incarnation:
            member.draining = False
        member.state, member.incarnation, member.connected = state, state.incarnation, True
        silent_s = SILENT_BEATS * state.heartbeat_ms / 1e3 or SILENT_S
        if silent_s < self._table[_SILENT_S, member.index]:
            self._nobody_silent_until = 0.0
        self._table[:, member.index] = now, silent_s

    def on_heartbeat(self, member: Member, now: float) -> None:
        """A heartbeat: its state is unchanged."""
        self._table[_LAST_SEEN, member.index] = now

    def last_seen(self, member: Member) -> float:
        """When it last told anything; 0: never."""
        return float(self._table[_LAST_SEEN, member.index])

    def is_live(self, member: Member, now: float) -> bool:
        """Whether its state stream is open and speaking."""
        return member.connected and self.last_seen(member) >= now - SILENT_S

    def judge(self, member: Member) -> bool:
        """Work out what its state allows; whether it has become eligible by that."""
        verdict = _PHASES.get(member.state.phase, IneligibleReason.LOADING)
        if member.draining:
            verdict = IneligibleReason.DRAINING
        if not member.connected:
            verdict = IneligibleReason.DISCONNECTED
        if verdict is member.verdict:
            return False
        member.verdict = verdict
        self._verdicts[member.index] = verdict
        return verdict is IneligibleReason.ELIGIBLE

    def why_not(self) -> NDArray[np.uint8]:
        """What the states allow, [n_workers], as a new array."""
        return self._verdicts.copy()

    def silent(self, now: float) -> NDArray[np.bool_] | None:
        """Who has said nothing for too long; None: nobody.

        A worker that speaks may only be silent later, so that most decisions need not look at the workers.
        """
        if now <= self._nobody_silent_until:
            return None
        silent: NDArray[np.bool_] = self._table[_LAST_SEEN] < now - self._table[_SILENT_S]
        if np.count_nonzero(silent):
            return silent
        self._nobody_silent_until = float(self._table.sum(axis=0).min(initial=np.inf))
        return None
