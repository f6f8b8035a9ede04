"""Which adapters the members of a pool hold, and how long loading another one takes them."""

from __future__ import annotations

import numpy as np
from ryzanstein.v1 import worker_pb2

from services.router.membership import Member
from services.router.snapshot import AdapterLoads, Floats

# Assumed until a worker has measured a load.
READ_MS = 1000.0
COPY_MS = 20.0

_READ_MS, _COPY_MS, _IN_USE = range(3)  # rows of the table, in the order of the state's fields


class AdapterTracker:
    """The adapters of a pool's members."""

    def __init__(self) -> None:
        self._table: Floats = np.zeros((3, 0))  # [rows, n_workers]
        self._held: dict[Member, dict[str, bool]] = {}  # digests; whether the adapter is in a slot
        self._holders: dict[str, set[Member]] = {}  # by digest

    def join(self, member: Member) -> None:
        """A worker joins, in the last column."""
        self._held[member] = {}
        self._table = np.concatenate([self._table, np.zeros((3, 1))], axis=1)

    def leave(self, member: Member, index: int) -> None:
        """The worker in column `index` leaves."""
        self._hold(member, {})
        del self._held[member]
        self._table = np.delete(self._table, index, axis=1)

    def on_state(self, member: Member, state: worker_pb2.WorkerState) -> None:
        """Apply a reported state, which replaces what was booked."""
        self._table[:, member.index] = state.adapter_read_ms, state.adapter_copy_ms, state.adapter_slots_in_use
        held = {adapter.digest: adapter.in_slot for adapter in state.adapters}
        if held != self._held[member]:
            self._hold(member, held)

    def book(self, member: Member, digest: str) -> None:
        """A request with this adapter goes to the worker, which will load it if needed."""
        self._hold(member, {**self._held[member], digest: True})

    def loads(self, digest: str) -> AdapterLoads:
        """Return each worker's cost of loading an adapter."""
        load_ms = _measured(self._table[_READ_MS], READ_MS)
        waits = self._table[_IN_USE].copy()
        for member in self._holders.get(digest, ()):
            copy_ms = float(self._table[_COPY_MS, member.index]) or COPY_MS
            load_ms[member.index] = 0.0 if self._held[member][digest] else copy_ms
            waits[member.index] *= not self._held[member][digest]
        return AdapterLoads(digest, load_ms, waits)

    def _hold(self, member: Member, held: dict[str, bool]) -> None:
        for digest in self._held[member].keys() - held.keys():
            holders = self._holders[digest]
            holders.discard(member)
            if not holders:
                del self._holders[digest]
        for digest in held.keys() - self._held[member].keys():
            self._holders.setdefault(digest, set()).add(member)
        self._held[member] = held


def _measured(reported: Floats, assumed: float) -> Floats:
    """The reported times; workers that have measured none get the mean of the others."""
    known = reported > 0
    n_known = np.count_nonzero(known)
    if n_known == len(reported):
        return reported.copy()
    return np.where(known, reported, reported.sum() / n_known if n_known else assumed)
