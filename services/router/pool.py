"""The workers of one model as this router knows them: membership, load, speeds and breakers."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray
from ryzanstein.v1 import worker_pb2

from services.router.adapter_tracker import AdapterTracker
from services.router.breaker import BreakerLimits
from services.router.breakers import Breakers
from services.router.load_tracker import LoadTracker
from services.router.membership import Member, Membership
from services.router.snapshot import IneligibleReason, Snapshot
from services.router.speed_tracker import SpeedTracker


class Pool:
    """The pool of one model. `clock` is monotonic, in seconds."""

    def __init__(self, model: str, saturation_s: float, clock: Callable[[], float]) -> None:
        self.model = model
        self.saturation_s = saturation_s
        self.load = LoadTracker(clock())
        self.breakers = Breakers()
        self.adapters = AdapterTracker()
        self._membership = Membership()
        self._speeds = SpeedTracker()
        self._clock = clock
        self._even = np.zeros(0), np.zeros(0), np.zeros(0)  # shares, excess, load shares of a fleet that is not busy

    @property
    def members(self) -> Mapping[str, Member]:
        """Members by worker id, in the order of the snapshots' arrays."""
        return self._membership.members

    @property
    def version(self) -> int:
        """The number of changes of the members, their indices or incarnations."""
        return self._membership.version

    def add(self, worker_id: str, address: str, limits: BreakerLimits) -> None:
        """A worker joins, not connected yet."""
        if worker_id in self.members:
            self.remove(worker_id)
        member = self._membership.join(worker_id, address)
        self.load.join(member)
        self.breakers.join(member, limits)
        self.adapters.join(member)
        self._speeds.join()
        self._resized()

    def remove(self, worker_id: str) -> None:
        """A worker leaves."""
        index = self.members[worker_id].index
        member = self._membership.leave(worker_id)
        self.load.leave(member, index)
        self.breakers.leave(member)
        self.adapters.leave(member, index)
        self._speeds.leave(index)
        self._resized()

    def _resized(self) -> None:
        n = len(self.members)
        self._even = np.ones(n), np.zeros(n), np.ones(n)

    def update(self, worker_id: str, state: worker_pb2.WorkerState, router_id: str) -> bool:
        """Apply a reported state; return whether the worker's process or its phase is another one."""
        member, now = self.members[worker_id], self._clock()
        before = member.incarnation, member.state.phase
        if state.incarnation != member.incarnation:
            self.load.restarted(member, state.computed_tokens)
            self.breakers.restarted(member)
            self._speeds.restarted(member)
        self._speeds.on_state(member, state, self._membership.last_seen(member), now)
        self._membership.on_state(member, state, now)
        self.load.on_state(member, state, now)
        self.adapters.on_state(member, state)
        self._judge(member)
        self.load.acknowledged(member, state, router_id)
        return before != (member.incarnation, member.state.phase)

    def on_heartbeat(self, worker_id: str) -> None:
        """A heartbeat: the state is unchanged."""
        self._membership.on_heartbeat(self.members[worker_id], self._clock())

    def disconnected(self, worker_id: str) -> None:
        """The worker's state stream is broken: it gets no new requests."""
        member = self.members[worker_id]
        member.connected = False
        self._judge(member)

    def set_draining(self, worker_id: str, draining: bool) -> None:
        """Note that this router has asked the worker to drain, or no longer does. A restart of the worker clears it."""
        member = self.members[worker_id]
        member.draining = draining
        self._judge(member)

    def set_resting(self, worker_id: str, resting: bool) -> None:
        """Note that the worker is about to sleep and gets no requests, or no longer. A restart of it clears this."""
        member = self.members[worker_id]
        member.resting = resting
        self._judge(member)

    def _judge(self, member: Member) -> None:
        if self._membership.judge(member):
            others = self._membership.why_not() == IneligibleReason.ELIGIBLE
            others[member.index] = False
            self.load.catch_up(member, others)

    def book(self, worker_id: str, seq: int, tokens: int, adapter: str = "") -> None:
        """Book a request with `tokens` to prefill, and an adapter's digest. `seq` grows from dispatch to dispatch."""
        member, now = self.members[worker_id], self._clock()
        if adapter:
            self.adapters.book(member, adapter)
        self.breakers.called(member, now)
        self.load.book(member, seq, tokens, now)

    def unbook(self, worker_id: str, seq: int) -> None:
        """Take back a booked dispatch that went to another worker."""
        member = self.members.get(worker_id)
        if member is not None and self.load.unbook(member, seq):
            self.breakers.no_verdict(member, self._clock())

    def fault(self, worker_id: str, incarnation: str) -> None:
        """A request failed at the worker. A report about an earlier incarnation is ignored, here and below."""
        if member := self._membership.incarnate(worker_id, incarnation):
            self.breakers.fault(member, self._clock())

    def success(self, worker_id: str, incarnation: str) -> None:
        """A request succeeded at the worker."""
        if member := self._membership.incarnate(worker_id, incarnation):
            self.breakers.success(member, self._clock())

    def no_verdict(self, worker_id: str, incarnation: str) -> None:
        """A request ended for a reason outside the worker."""
        if member := self._membership.incarnate(worker_id, incarnation):
            self.breakers.no_verdict(member, self._clock())

    def is_live(self, worker_id: str) -> bool:
        """Whether the worker's state stream is open and not silent."""
        return self._membership.is_live(self.members[worker_id], self._clock())

    def snapshot(self) -> Snapshot:
        """The pool as it is now."""
        now = self._clock()
        self.load.expire(now)
        speeds = self._speeds.speeds(now)
        queued, load = self.load.queued_tokens(), self.load.requests()
        why_not = self._why_not(queued > self.saturation_s * speeds.prefill_rate, now)
        counts = (why_not == 0).astype(np.float64) if np.count_nonzero(why_not) else self._even[0]
        shares = self.load.shares(now, speeds, load, queued, counts)
        share, excess, load_share = shares or self._even
        return Snapshot(
            worker_ids=self._membership.ids,
            identities=self._membership.identities,
            why_not=why_not,
            queued_tokens=queued,
            load=load,
            busy=shares is not None,
            share=share,
            excess=excess,
            load_share=load_share,
            speeds=speeds,
        )

    def _why_not(self, saturated: NDArray[np.bool_], now: float) -> NDArray[np.uint8]:
        why_not = self._membership.why_not()
        for verdict, mask in (
            (IneligibleReason.SILENT, self._membership.silent(now)),
            (IneligibleReason.SATURATED, saturated),
        ):
            if mask is not None and np.count_nonzero(mask):  # rare; the masked assignment takes ten times as long
                why_not[mask & (why_not == 0)] = verdict
        for index in self.breakers.ejected(now):
            why_not[index] = why_not[index] or IneligibleReason.BREAKER
        return why_not
