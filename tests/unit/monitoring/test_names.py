"""Every metric, label, value and bucket in a rule or panel is exported, and every exported metric is shown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import yaml

from tests.programs import CHART
from tests.unit.monitoring.exported import (
    Exported,
    MetricQuery,
    alerts,
    complaints,
    dashboards,
    exported,
    queries,
    recorded,
    rules,
)

THERE = exported()
QUERIES = list(queries())
RECORDED = recorded()
MOST_PANELS = 20
OF_GRAFANA_11 = 39  # the version of its schema; newer ones migrate it
VARIABLE = re.compile(r"\$(?:{(\w+)}|(\w+))")
OF_GRAFANA = {"__all"}
PANELS = {"row", "timeseries", "stat", "state-timeline"}
# Of Grafana's: another name would show bare numbers.
UNITS = {"Bps", "bytes", "celsius", "ops", "percent", "percentunit", "reqps", "s", "short", "watt"}


def _complaints(there: Exported) -> list[str]:
    return [complaint for query in QUERIES for complaint in complaints(query, there, RECORDED)]


def test_every_queried_metric_is_exported() -> None:
    assert len(QUERIES) > 150
    assert _complaints(THERE) == []


def test_every_exported_metric_is_in_a_panel_or_a_rule() -> None:
    """A renamed one is missed by the panel or rule that asks for it."""
    queried = {name for query in QUERIES for name in re.findall(r"\w+", query.expr)}
    for family in THERE.families:
        names = {name for name in THERE.labels if name.removesuffix("_total") == family or _part_of(name, family)}
        assert names & queried, f"{family} is in no panel and no rule"
    name = "ryzanstein_gateway_requests_total"
    renamed = {f"{each}_renamed" if each == name else each: labels for each, labels in THERE.labels.items()}
    assert any("not exported" in complaint for complaint in _complaints(replace(THERE, labels=renamed)))


def _part_of(name: str, family: str) -> bool:
    return re.fullmatch(rf"{family}_(bucket|sum|count)", name) is not None


@pytest.mark.parametrize(
    ("expr", "complaint"),
    [
        ("ryzanstein_gateway_request_total", "not exported"),
        ('ryzanstein_gateway_redis_up{state="x"}', "has no label state"),
        ('ryzanstein_gateway_time_to_first_token_seconds_bucket{le="2.0"}', "has no bucket 2.0"),
        ('ryzanstein_router_workers{state="ready"}', "is never ready"),
        ("sum by (model) (ryzanstein_worker_running)", "can't be summed by model"),
    ],
)
def test_faulty_queries_are_detected(expr: str, complaint: str) -> None:
    actual = list(complaints(MetricQuery("here", expr), THERE, RECORDED))
    assert len(actual) == 1
    assert complaint in actual[0]


def test_a_lost_label_is_noticed() -> None:
    labels = {**THERE.labels, "ryzanstein_gateway_requests_total": frozenset({"api", "route", "model"})}
    assert any("has no label status" in complaint for complaint in _complaints(replace(THERE, labels=labels)))


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda dashboard: dashboard["uid"])
def test_dashboards_are_orderly(dashboard: dict) -> None:  # type: ignore[type-arg]
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len(panels) <= MOST_PANELS
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    cells: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert at["x"] + at["w"] <= 24
        assert not own & cells, panel["title"]
        cells |= own
    uids = {each["uid"] for each in dashboards()}
    assert {link["url"].removeprefix("/d/") for link in dashboard["links"]} == uids - {dashboard["uid"]}
    text = str(panels)
    for variable in dashboard["templating"]["list"]:
        assert f"${variable['name']}" in text or f"${{{variable['name']}}}" in text, variable["name"]
    for panel in panels:
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]


@pytest.mark.parametrize("dashboard", dashboards(), ids=lambda dashboard: dashboard["uid"])
def test_dashboards_are_importable_from_a_file(dashboard: dict) -> None:  # type: ignore[type-arg]
    """Nothing is asked for at an import, every variable is defined, every source is one that Grafana has."""
    assert dashboard["schemaVersion"] >= OF_GRAFANA_11
    assert not {"id", "__inputs", "__requires"} & dashboard.keys()
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    used = {name for match in VARIABLE.findall(json.dumps(dashboard)) for name in match if name}
    assert used - OF_GRAFANA == variables.keys() | {"__rate_interval"}
    sources = list(_sources(dashboard))
    assert len(sources) > len(dashboard["panels"])
    assert all(source == {"type": "prometheus", "uid": "${datasource}"} for source in sources)
    assert variables["datasource"]["type"] == "datasource"
    provisioned = yaml.safe_load((CHART.parents[1] / "deploy" / "monitoring" / "sources.yaml").read_text())
    assert variables["datasource"]["query"] in {each["type"] for each in provisioned["datasources"]}
    for panel in dashboard["panels"]:
        assert panel["type"] in PANELS
        ids = [target["refId"] for target in panel.get("targets", ())]
        assert len(ids) == len(set(ids)), panel["title"]
        assert panel["type"] == "row" or panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]


def _sources(node: Any) -> Iterator[Any]:
    """Every data source that a part of a dashboard names."""
    for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
        if key == "datasource":
            yield value
        else:
            yield from _sources(value)


def test_rates_have_enough_samples() -> None:
    """At 15 s between scrapes."""
    for query in QUERIES:
        for window in re.findall(r"rate\([^\[]*\[(\w+)\]", query.expr):
            assert window[-1] in "hd" or (window[-1] == "m" and int(window[:-1]) >= 1), query.place


def test_alerts_have_a_summary_and_a_runbook() -> None:
    for name, alert in alerts().items():
        assert re.fullmatch(r"Ryzanstein[A-Za-z]+", name)
        assert alert["labels"]["severity"] in ("page", "ticket", "info")
        assert {"summary", "description", "runbook_url"} == alert["annotations"].keys()
    assert len({rule["record"] for rule in rules() if "record" in rule}) == len([r for r in rules() if "record" in r])
