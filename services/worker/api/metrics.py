"""Prometheus metrics of one worker, all named ``ryzanstein_worker_*``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from ryzanstein.v1 import worker_pb2 as pb

from services.common.metrics import NewMetrics
from services.common.phases import phase_name
from services.worker.engine.base import StepReport
from services.worker.engine.state import DRAFTERS, EngineCounters, EngineState, add_totals

_LATENCY = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_COUNTERS = {
    "prefill_tokens": "Prompt tokens computed",
    "generated_tokens": "Tokens generated",
    "prefix_hit_tokens": "Known tokens whose KV was found in the prefix cache",
    "preemptions": "Requests put back into the queue because the KV cache was full",
    "discarded_tokens": "Tokens drawn after their request had ended",
    "adapter_evictions": "LoRA adapters that lost their slots to others",
}
# name: (field of the state, meaning)
_GAUGES = {
    "running": ("running", "Requests being computed"),
    "waiting": ("waiting", "Requests waiting"),
    "queued_prefill_tokens": ("queued_prefill_tokens", "Known tokens that are not computed yet"),
    "kv_blocks_used": ("kv_blocks_used", "KV blocks held by requests"),
    "kv_blocks_cached": ("kv_blocks_cached", "KV blocks that are reusable and evictable"),
    "kv_blocks_capacity": ("kv_blocks_total", "Number of KV blocks"),  # Prometheus keeps _total for counters
    "memory_held_bytes": ("memory_bytes", "Memory that ranks and host tier hold now; 0: not measured"),
    "adapter_waiting": ("adapter_waiting", "Requests whose LoRA adapter is being loaded, or waits for a slot"),
}


class EngineTotals(Collector):
    """Totals and levels of the engines of a process, read at each scrape."""

    def __init__(self, counters: Sequence[EngineCounters], states: Sequence[Callable[[], EngineState]]) -> None:
        self._counters, self._states = counters, states

    def collect(self) -> Iterable[Metric]:
        """Read everything once."""
        state, counters = EngineState.of_all([each() for each in self._states]), add_totals(self._counters)
        drafts = {
            "drafted_tokens": ("Drafted tokens that steps verified, by drafter", counters.proposed_tokens),
            "accepted_tokens": ("Drafted tokens that were drawn, by drafter", counters.accepted_tokens),
        }
        for name, text in _COUNTERS.items():
            yield CounterMetricFamily(f"ryzanstein_worker_{name}", text, value=getattr(counters, name))
        for name, (text, totals) in drafts.items():
            family = CounterMetricFamily(f"ryzanstein_worker_{name}", text, labels=["drafter"])
            for drafter in DRAFTERS:
                family.add_metric([drafter], totals[drafter])
            yield family
        for name, (field, text) in _GAUGES.items():
            yield GaugeMetricFamily(f"ryzanstein_worker_{name}", text, value=getattr(state, field))
        resident = GaugeMetricFamily(
            "ryzanstein_worker_adapters", "LoRA adapters in slots and in memory only", labels=["place"]
        )
        for place, in_slot in (("slot", True), ("memory", False)):
            resident.add_metric([place], sum(one.in_slot is in_slot for one in state.adapters))
        yield resident
        memory = GaugeMetricFamily(
            "ryzanstein_worker_memory_bytes",
            "Memory that the worker takes while it serves, by purpose",
            labels=["kind"],
        )
        for kind, size in state.memory.items():
            memory.add_metric([kind], size)
        yield memory
        serving = GaugeMetricFamily("ryzanstein_worker_phase", "1 for the phase the worker is in", labels=["phase"])
        for phase in pb.Phase.values()[1:]:
            serving.add_metric([phase_name(phase)], float(phase == state.phase))
        yield serving


class WorkerMetrics:
    """Histograms that the engine feeds; implements StepObserver."""

    def __init__(self, registry: CollectorRegistry) -> None:
        new = NewMetrics(registry, "ryzanstein_worker_")
        self._queue = new.histogram("queue_seconds", "From submit to admission", _LATENCY)
        self._ttft = new.histogram("ttft_seconds", "From submit to the first token", _LATENCY)
        self._step = new.histogram("step_seconds", "From a step's start to its result", _LATENCY)
        self._last_step = new.gauge(
            "last_step_timestamp_seconds", "Unix time of the last step's result; 0 before the first one"
        )
        self._rows = new.histogram(
            "step_rows", "Tokens computed in a step", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
        )
        self._adapter_load = new.histogram(
            "adapter_load_seconds",
            "Loads of LoRA adapters into slots, from files or memory, by result",
            _LATENCY,
            ["source", "result"],
        )
        for source, result in itertools.product(("files", "memory"), ("ok", "refused", "lost")):
            self._adapter_load.labels(source, result)
        split = new.histogram("step_part_seconds", "Time of the parts of a step on rank 0", _LATENCY, ["part"])
        self._parts = {part: split.labels(part) for part in ("wait", "forward", "communication", "sample")}

    def on_step(self, report: StepReport) -> None:
        """A step is complete."""
        self._step.observe(report.seconds)
        self._last_step.set(time.time())
        self._rows.observe(report.n_rows)
        for part, seconds in report.parts.items():
            self._parts[part].observe(seconds)

    def on_first_output(self, queue_s: float, total_s: float) -> None:
        """A request got its first output."""
        self._queue.observe(queue_s)
        self._ttft.observe(total_s)

    def on_adapter_load(self, source: str, result: str, seconds: float) -> None:
        """An adapter was loaded, or was not."""
        self._adapter_load.labels(source, result).observe(seconds)
