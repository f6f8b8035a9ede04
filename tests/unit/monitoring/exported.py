"""Metrics that the services export, and those that a query names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import promql_parser
import yaml
from prometheus_client.metrics import Histogram
from ryzanstein.v1 import worker_pb2 as pb

from docs.reference import metrics_page
from services.common.phases import phase_name
from services.gateway.generation.attempt import Cause
from services.gateway.telemetry import ModelHistograms
from services.router.breaker import BreakerState
from services.router.snapshot import IneligibleReason
from services.worker.engine.state import PULL_FAILURES
from tests.programs import CHART

# Labels that the relabelling of every mode adds (tests/charts holds both modes to it).
TARGET_LABELS = frozenset({"job", "instance", "namespace", "release", "component", "ryzanstein_pool", "node", "pod"})
OF_PROMETHEUS = {"up": TARGET_LABELS, "ALERTS": TARGET_LABELS | {"alertname", "alertstate", "severity"}}
# By others, for whom the chart has switches: kube-state-metrics, the kubelet, dcgm-exporter.
OF_OTHERS = ("kube_", "kubelet_", "container_", "DCGM_")
# Values that code knows; a selector may name no other.
VALUES = {
    ("ryzanstein_gateway_resumes_total", "cause"): {cause.value for cause in Cause},
    ("ryzanstein_router_workers", "state"): {why.text or "eligible" for why in IneligibleReason},
    ("ryzanstein_router_breakers", "state"): {state.value for state in BreakerState},
    ("ryzanstein_worker_phase", "phase"): {phase_name(phase) for phase in pb.Phase.values()[1:]},
    ("ryzanstein_coordinator_workers", "state"): {"synced", "behind"},
    ("ryzanstein_coordinator_events_total", "kind"): {"events", "gaps", "resyncs"},
    ("ryzanstein_router_lookups_total", "result"): {"answered", "failed"},
    ("ryzanstein_worker_pull_failures_total", "reason"): set(PULL_FAILURES),
}


@dataclass
class Exported:
    """Labels by sample name, and the bounds of histograms as they are exported."""

    labels: dict[str, frozenset[str]] = field(default_factory=dict)
    bounds: dict[str, frozenset[str]] = field(default_factory=dict)
    families: set[str] = field(default_factory=set)


def exported() -> Exported:
    """Of all services, read from their registries."""
    actual = Exported()
    for registry in (metrics_page.process_registry(), *metrics_page.service_registries().values()):
        bounds = _bounds(registry)
        for family, names in metrics_page.labelled(registry):
            actual.families.add(family.name)
            labels = frozenset(names)
            if family.type == "histogram":
                actual.labels |= {f"{family.name}_{part}": labels for part in ("sum", "count")}
                actual.labels[f"{family.name}_bucket"] = labels | {"le"}
                actual.bounds[f"{family.name}_bucket"] = bounds[family.name]
            else:
                actual.labels[f"{family.name}_total" if family.type == "counter" else family.name] = labels
    return actual


def _bounds(registry: Any) -> dict[str, frozenset[str]]:
    def texts(bounds: Any) -> frozenset[str]:
        return frozenset(repr(float(bound)) for bound in bounds)

    collectors = list(registry._collector_to_names)
    return {each._name: texts(each._upper_bounds) for each in collectors if isinstance(each, Histogram)} | {
        each._name: texts(each.bounds) for each in collectors if isinstance(each, ModelHistograms)
    }


@dataclass(frozen=True)
class MetricQuery:
    """One expression and where it stands."""

    place: str
    expr: str
    shown: frozenset[str] = frozenset()  # labels in its legend


def rules() -> list[dict[str, Any]]:
    """All rules of the chart, as in its files."""
    files = [CHART / "files" / "rules" / f"{name}.yaml" for name in ("recording", "alerts")]
    return [rule for file in files for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """By name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def dashboards() -> list[dict[str, Any]]:
    """As Grafana reads them."""
    return [json.loads(file.read_text()) for file in sorted((CHART / "files" / "dashboards").glob("*.json"))]


def queries() -> Iterator[MetricQuery]:
    """Of every rule, panel, annotation and variable."""
    for rule in rules():
        yield MetricQuery(rule.get("alert") or rule["record"], rule["expr"])
    for dashboard in dashboards():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                shown = frozenset(re.findall(r"{{(\w+)}}", target["legendFormat"]))
                yield MetricQuery(f"{dashboard['uid']}: {panel['title']}", substituted(target["expr"]), shown)
        for annotation in dashboard["annotations"]["list"]:
            yield MetricQuery(f"{dashboard['uid']}: {annotation['name']}", substituted(annotation["expr"]))
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                metric, _, label = variable["definition"].removeprefix("label_values(").rpartition(", ")
                yield MetricQuery(
                    f"{dashboard['uid']}: ${variable['name']}", f"count by ({label[:-1]}) ({substituted(metric)})"
                )


def substituted(expr: str) -> str:
    """With Grafana's variables at All."""
    for name in ("namespace", "release", "model", "pool", "component"):
        expr = expr.replace(f'"${name}', '".*')
    return expr.replace("$__rate_interval", "1m")


def complaints(query: MetricQuery, there: Exported, recorded: dict[str, frozenset[str]]) -> Iterator[str]:
    """Complaints about names of the query that no service exports."""
    known = there.labels | recorded | OF_PROMETHEUS
    tree = parsed(query.expr)
    selectors = [each for each in _selectors(tree) if not each[0].startswith(OF_OTHERS)]
    for name, matchers in selectors:
        if name not in known:
            yield f"{query.place}: not exported: {name}"
            return
        for label, value in matchers:
            yield from (f"{query.place}: {text}" for text in _of_matcher(name, label, value, known[name], there))
    if len(selectors) < len(list(_selectors(tree))):
        return  # exports of others aren't known here
    yield from (f"{query.place}: {text}" for text in _of_labels(tree, query.shown, known))


def _of_matcher(name: str, label: str, value: str, labels: frozenset[str], there: Exported) -> Iterator[str]:
    if label not in labels | TARGET_LABELS:
        yield f"{name} has no label {label}"
    if label == "le" and value not in there.bounds.get(name, ()):
        yield f"{name} has no bucket {value}"
    values = set(value.split("|"))
    strange = values - VALUES.get((name, label), values)
    if strange and ".*" not in value:
        yield f"{name}'s {label} is never {', '.join(sorted(strange))}"


def _of_labels(tree: Any, shown: frozenset[str], known: dict[str, frozenset[str]]) -> Iterator[str]:
    def labels(node: Any) -> frozenset[str]:
        return frozenset().union(*(known[name] | TARGET_LABELS for name, _ in _selectors(node)))

    for stored, inner in _aggregations(tree):
        for label in stored - labels(inner):
            yield f"{inner} can't be summed by {label}"
    for label in shown - labels(tree):
        yield f"the legend shows {label}, which no metric has"


@cache
def parsed(expr: str) -> Any:
    """The syntax tree."""
    return promql_parser.parse(expr)


def _aggregations(node: Any) -> Iterator[tuple[frozenset[str], Any]]:
    """Every aggregation below a node: the labels that it keeps, and what it sums."""
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        yield frozenset(node.modifier.labels), node.expr
    for child in _children(node):
        yield from _aggregations(child)


def _selectors(node: Any) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Every vector selector below a node of the syntax tree: its metric and its matchers."""
    if isinstance(node, promql_parser.VectorSelector):
        matchers = [(each.name, each.value) for each in node.matchers.matchers]
        yield str(node.name), matchers
        return
    for child in _children(node):
        yield from _selectors(child)


def _children(node: Any) -> Iterator[Any]:
    for name in ("expr", "lhs", "rhs", "vector_selector"):
        if (child := getattr(node, name, None)) is not None:
            yield child
    yield from getattr(node, "args", None) or ()


def recorded() -> dict[str, frozenset[str]]:
    """Labels of recorded series: those that their expression sums by."""
    return {rule["record"]: _kept(rule["expr"]) for rule in rules() if "record" in rule}


def _kept(expr: str) -> frozenset[str]:
    return frozenset().union(*(labels for labels, _ in _aggregations(parsed(expr)))) - {"le"}
