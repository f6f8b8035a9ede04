"""The members of a pool, and whether their states allow requests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import worker_pb2

from services.router.snapshot import Hashes, IneligibleReason, hash64

# A worker that has missed two heartbeats counts as silent: it is stopped or cut off. SILENT_S is the limit for a worker
# that does not report its interval.
SILENT_BEATS, SILENT_S = 2.5, 5.0

_PHASES = {
    worker_pb2.PHASE_SERVING: IneligibleReason.ELIGIBLE,
    worker_pb2.PHASE_RECOVERING: IneligibleReason.RECOVERING,
    worker_pb2.PHASE_DRAINING: IneligibleReason.DRAINING,
    worker_pb2.PHASE_SLEEPING: IneligibleReason.SLEEPING,
    worker_pb2.PHASE_WAKING: IneligibleReason.WAKING,
}
_LAST_SEEN, _SILENT_S = range(2)  # rows of the table; _SILENT_S: the pause after which the worker counts as silent


@dataclass(slots=True, eq=False)
class Member:
    """One worker. `index` is its place in all arrays of its pool."""

    worker_id: str
    address: str
    index: int
    identity: int  # hash64 of the worker id
    verdict: IneligibleReason = IneligibleReason.DISCONNECTED  # from its state alone
    state: worker_pb2.WorkerState = field(default_factory=worker_pb2.WorkerState)
    incarnation: str = ""
    connected: bool = False
    draining: bool = False  # this router asked it to; perhaps not reported yet
    resting: bool = False  # this router is about to put it to sleep
    wake_refusal: str = ""  # reason of a refused wake; empty after a wake


class Membership:
    """The members of a pool in the order of its arrays. Times are seconds of the pool's clock."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.ids: tuple[str, ...] = ()
        self.identities: Hashes = np.zeros(0, dtype=np.uint64)
        self._table = np.zeros((2, 0))  # [rows, n_workers]
        self._verdicts = np.zeros(0, dtype=np.uint8)
        self._all_beat_until = 0.0  # before this moment no worker can be silent
        self.version = 0  # number of changes of the members, their indices or incarnations

    def join(self, worker_id: str, address: str) -> Member:
        """A worker joins, not connected yet."""
        member = self.members[worker_id] = Member(worker_id, address, len(self.ids), hash64(worker_id))
        self._table = np.concatenate([self._table, np.array([[0.0], [SILENT_S]])], axis=1)
        self._verdicts = np.append(self._verdicts, np.uint8(IneligibleReason.DISCONNECTED))
        self._renumber()
        return member

    def leave(self, worker_id: str) -> Member:
        """A worker leaves; later columns move up by one."""
        member = self.members.pop(worker_id)
        self._table = np.delete(self._table, member.index, axis=1)
        self._verdicts = np.delete(self._verdicts, member.index)
        self._renumber()
        return member

    def _renumber(self) -> None:
        self._all_beat_until = 0.0
        self.version += 1
        self.ids = tuple(self.members)
        self.identities = np.array([member.identity for member in self.members.values()], dtype=np.uint64)
        for index, member in enumerate(self.members.values()):
            member.index = index

    def incarnate(self, worker_id: str, incarnation: str) -> Member | None:
        """The worker, if `incarnation` is its current process."""
        member = self.members.get(worker_id)
        return member if member is not None and member.incarnation == incarnation else None

    def on_state(self, member: Member, state: worker_pb2.WorkerState, now: float) -> None:
        """Store a reported state. A new process neither drains nor rests."""
        if state.incarnation != member.incarnation:
            member.draining = member.resting = False
            self.version += 1
        member.state, member.incarnation, member.connected = state, state.incarnation, True
        silent_s = SILENT_BEATS * state.heartbeat_ms / 1e3 or SILENT_S
        if silent_s < self._table[_SILENT_S, member.index]:
            self._all_beat_until = 0.0
        self._table[:, member.index] = now, silent_s

    def on_heartbeat(self, member: Member, now: float) -> None:
        """A heartbeat: the state is unchanged."""
        self._table[_LAST_SEEN, member.index] = now

    def last_seen(self, member: Member) -> float:
        """When the last state or heartbeat arrived; 0: never."""
        return float(self._table[_LAST_SEEN, member.index])

    def is_live(self, member: Member, now: float) -> bool:
        """Whether the state stream is open and not silent."""
        return member.connected and self.last_seen(member) >= now - SILENT_S

    def judge(self, member: Member) -> bool:
        """Recompute the worker's verdict; return whether it has become eligible."""
        verdict = _PHASES.get(member.state.phase, IneligibleReason.LOADING)
        if member.resting and verdict is IneligibleReason.ELIGIBLE:
            verdict = IneligibleReason.SLEEPING
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
        """The verdicts, [n_workers]; a new array."""
        return self._verdicts.copy()

    def silent(self, now: float) -> NDArray[np.bool_] | None:
        """The silent workers as a mask; None if there are none.

        A message from a worker only postpones the moment at which it counts as silent. So the earliest such moment is
        stored, and most decisions need not scan the table.
        """
        if now <= self._all_beat_until:
            return None
        silent: NDArray[np.bool_] = self._table[_LAST_SEEN] < now - self._table[_SILENT_S]
        if np.count_nonzero(silent):
            return silent
        self._all_beat_until = float(self._table.sum(axis=0).min(initial=np.inf))
        return None
