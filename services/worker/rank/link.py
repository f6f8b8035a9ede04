"""A rank's end of the server's shared memory: plans come in, results and events go out."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from services.common.cores import usable_cores
from services.compute.ranks.futex import Patience
from services.compute.ranks.line import RankLine, RankState
from services.compute.ranks.segment import Segment
from services.worker.ipc.doorbell import DoorbellButton
from services.worker.ipc.life_lock import LifeLock
from services.worker.ipc.ring import RingReader, RingWriter
from services.worker.protocol.order_codec import ORDER_KINDS, AdapterOrder, Order, SleepOrder, WakeOrder, decode_order
from services.worker.protocol.plan_codec import PlanView, decode_plan
from services.worker.protocol.rank_config import GroupLayout, RankSettings
from services.worker.protocol.words import Kind, MalformedMessageError, read_words

_TICK_S = 0.25  # seconds between an idle rank's checks that the server lives
_SPIN_S = 0.001
_ROOM_TIMEOUT_S = 30.0


class ServerGoneError(RuntimeError):
    """The server process died or stopped reading."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message (a plan, an order, or None to stop) and how long the rank waited for it."""

    plan: PlanView | Order | None
    wait_us: int
    number: int = 0  # an order's, which the answer repeats


class ServerLink:
    """The link to the server. A rank opens it before importing torch, so that it can report every failure."""

    def __init__(self, settings: RankSettings, rank: int) -> None:
        config, endpoint = settings.config, settings.endpoint
        layout = GroupLayout.of(config)
        self.segment = Segment.attach(endpoint.server_pid, endpoint.segment_fd)
        self.layout = layout
        self.line = RankLine(self.segment, layout.control, rank)
        # The server also needs a core: with as many ranks as cores, a rank yields its core while spinning.
        self.patience = Patience.choose(config.ranks + 1, usable_cores(), _SPIN_S)
        self._plans = RingReader(self.segment, layout.plans, layout.plan_capacity, config.ranks, rank)
        self._results = RingWriter(self.segment, layout.results[rank], layout.result_capacity, 1)
        self._doorbell = DoorbellButton(endpoint.server_pid, endpoint.doorbell_fd)
        start = layout.staging[rank]
        self.staging = self.segment.view[start : start + layout.staging_bytes]
        self._parent = os.getppid()
        LifeLock(self.segment, layout.life_locks[rank]).hold()  # the server waits for it after `introduce`
        self.line.introduce(os.getpid())
        self._doorbell.ring()

    def waits(self, timeout_s: float) -> bool:
        """Whether there is a message within `timeout_s` seconds."""
        return self._plans.wait(timeout_s, self.patience)

    def sleeps(self, timeout_s: float) -> bool:
        """Like `waits`, without spinning."""
        return self._plans.wait(timeout_s, Patience(0.0))

    def receive(self) -> Received:
        """Wait for the next plan. Raises ServerGoneError, MalformedMessageError."""
        began = time.perf_counter_ns()
        self.line.enter(RankState.IDLE)
        while not self._plans.wait(_TICK_S, self.patience):
            self.line.beat()
            self._require_parent()
        message = self._plans.try_read()
        assert message is not None
        self.line.enter(RankState.COMPUTING)
        words = read_words(message)
        wait_us = (time.perf_counter_ns() - began) // 1000
        if words[0] == Kind.STOP:
            return Received(None, wait_us)
        if words[0] in ORDER_KINDS:
            number, order = decode_order(words)
            if isinstance(order, AdapterOrder):
                self.line.enter(RankState.LOADING)
            elif isinstance(order, SleepOrder | WakeOrder):
                self.line.enter(RankState.MOVING)
            return Received(order, wait_us, number)
        if words[0] != Kind.PLAN:
            raise MalformedMessageError(f"a message of kind {words[0]} where a plan must be")
        plan = decode_plan(words)
        self.line.begin_step(plan.step)
        return Received(plan, wait_us)

    def send(self, message: bytes | memoryview) -> None:
        """Send a message to the server. Raises ServerGoneError when the ring stays full for _ROOM_TIMEOUT_S."""
        deadline = time.monotonic() + _ROOM_TIMEOUT_S
        while not self._results.try_write(message):
            self._require_parent()
            self.line.beat()
            if time.monotonic() > deadline:
                raise ServerGoneError(f"the server read nothing for {_ROOM_TIMEOUT_S:g} s")
            time.sleep(0.001)
        self._doorbell.ring()

    def _require_parent(self) -> None:
        if os.getppid() != self._parent:
            raise ServerGoneError("the parent is gone")
