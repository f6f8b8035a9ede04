"""Measures how late the event loop runs its timers, which shows a stuck loop before its probe fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_TICK_S = 0.1


class LoopLag(Collector):
    """The longest delay of a timer since the last scrape."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._worst_s = 0.0
        self._timer: asyncio.TimerHandle  # while a loop is watched
        registry.register(self)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Measure the running loop while the block runs."""
        self._wait(asyncio.get_running_loop())
        try:
            yield
        finally:
            self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        due_at = loop.time() + _TICK_S
        self._timer = loop.call_at(due_at, self._tick, loop, due_at)

    def _tick(self, loop: asyncio.AbstractEventLoop, due_at: float) -> None:
        self._worst_s = max(self._worst_s, loop.time() - due_at)
        self._wait(loop)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry, from another thread."""
        worst, self._worst_s = self._worst_s, 0.0
        about = "Longest delay of a timer of the event loop since the last scrape"
        yield GaugeMetricFamily("ryzanstein_process_event_loop_lag_seconds", about, value=worst)
