"""The page of metrics, from what the services register."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from ryzanstein.v1 import worker_pb2

from services.common.loop_lag import LoopLag
from services.common.metrics import new_registry
from services.common.telemetry_names import ATTRIBUTES, SERIES
from services.common.tls.credentials import export_end
from services.finetuner.metrics import FinetunerMetrics
from services.gateway.telemetry import GatewayMetrics
from services.kv_coordinator.metrics import CoordinatorMetrics
from services.kv_coordinator.subscriptions import SyncCounters
from services.router.metrics import RouterMetrics
from services.worker.api.energy import EnergyMetrics
from services.worker.api.life_metrics import LifeMetrics
from services.worker.api.metrics import EngineTotals, WorkerMetrics
from services.worker.api.transfer_metrics import TransferMetrics
from services.worker.engine.state import EngineCounters, EngineState, TransferTotals
from services.worker.pool.main import restart_counter


def process_registry() -> CollectorRegistry:
    """Metrics of its process that every service exports."""
    process = new_registry("gateway")
    LoopLag(process)
    export_end(process, None)
    return process


def service_registries() -> dict[str, CollectorRegistry]:
    """Metrics that each service exports, by its title."""
    router, coordinator, worker = new_registry("router"), new_registry("kv-coordinator"), new_registry("worker")
    RouterMetrics(router, ())
    CoordinatorMetrics(coordinator, SyncCounters())
    LifeMetrics(worker)
    worker.register(EngineTotals([EngineCounters()], [lambda: EngineState(worker_pb2.PHASE_LOADING, "")]))
    WorkerMetrics(worker)
    worker.register(TransferMetrics([TransferTotals()]))
    worker.register(EnergyMetrics({"gpu-0": lambda: 0.0}))
    supervisor = new_registry("worker")
    restart_counter(supervisor)
    finetuner = new_registry("finetuner")
    FinetunerMetrics(finetuner)
    return {
        "Gateway": GatewayMetrics().registry,
        "Router": router,
        "KV-cache coordinator": coordinator,
        "Worker": worker,
        "Supervisor of a pod with several models": supervisor,
        "Fine-tuner": finetuner,
    }


def metrics() -> str:
    """Every metric of every service."""
    process = process_registry()
    lines = [
        "# Metrics",
        "",
        "Made by `make reference`. The gateway serves them at `/metrics` on its own port, every service on",
        "`RYZANSTEIN_METRICS_PORT`. Histograms come as `_bucket`, `_sum` and `_count`.",
    ]
    common = frozenset(family.name for family in process.collect())
    lines += _metrics_table("All services", process, frozenset())
    for title, registry in service_registries().items():
        lines += _metrics_table(title, registry, common)
    lines += _foreign_names()
    return "\n".join(lines) + "\n"


def _foreign_names() -> Iterator[str]:
    yield from (
        "",
        "## Names of other tools",
        "",
        "`RYZANSTEIN_TELEMETRY_NAMES` (chart: `telemetryNames`) names tools; gateways and workers then export these",
        "series, made of their own at each scrape. Labels that are not listed are summed over.",
        "",
        "| tool | series | made of | labels |",
        "|---|---|---|---|",
    )
    for series in SERIES:
        labels = [f"`{theirs}`" for theirs in (*series.copied.values(), series.operation) if theirs]
        labels += [f'`{theirs}="{value}"`' for theirs, value in series.labels.items()]
        yield f"| {series.scheme} | `{series.name}` | {series.formula} | {', '.join(labels)} |"
    yield from (
        "",
        "With `gen_ai`, spans of requests also have OpenTelemetry's attributes, `gen_ai.operation.name` and",
        "`gen_ai.provider.name` among them:",
        "",
        "| attribute | ours |",
        "|---|---|",
    )
    yield from (f"| `{theirs}` | `{ours}` |" for ours, theirs in ATTRIBUTES.items())


def _metrics_table(title: str, registry: CollectorRegistry, without: frozenset[str]) -> Iterator[str]:
    yield from ("", f"## {title}", "", "| metric | type | labels | meaning |", "|---|---|---|---|")
    for family, names in labelled(registry):
        if family.name not in without:
            labels = ", ".join(f"`{label}`" for label in names)
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |"


def labelled(registry: CollectorRegistry) -> Iterator[tuple[Metric, list[str]]]:
    """Every family and the names of its labels, which are no samples' before the first value."""
    known = {
        collector._name: collector._labelnames
        for collector in registry._collector_to_names
        if isinstance(collector, MetricWrapperBase)
    }
    for family in registry.collect():
        yield family, list(known.get(family.name) or _sampled_labels(family))


def _sampled_labels(family: Metric) -> list[str]:
    sampled = {label for sample in family.samples for label in sample.labels} - {"le"}
    return sorted(sampled | set(getattr(family, "_labelnames", ())))  # a family of our own names them without a sample
