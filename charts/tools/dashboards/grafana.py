"""Descriptions of dashboards, and Grafana's JSON of them.

In a query ``{@}`` stands for the labels of the release that is looked at, and ``{@,x="y"}`` for these and more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]

SELECTOR = 'namespace=~"$namespace",release=~"$release"'
RUNBOOKS = "https://github.com/ryzanstein/ryzanstein/blob/main/docs/runbooks"
INTERVAL = "$__rate_interval"
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_COLUMNS, _HEIGHT = 3, 7
_WIDTH = 24 // _COLUMNS


@dataclass(frozen=True)
class Panel:
    """One panel; `targets` are pairs of query and legend. `kind` is Grafana's name of the visualisation."""

    title: str
    unit: str
    targets: tuple[tuple[str, str], ...]
    about: str
    kind: str = "timeseries"
    stacked: bool = False


@dataclass(frozen=True)
class Dashboard:
    """Panels in rows. `filters` are further variables: (name, label, a metric that has the label)."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    filters: tuple[tuple[str, str, str], ...] = ()


def graph(title: str, unit: str, *targets: tuple[str, str], about: str, stacked: bool = False) -> Panel:
    """Lines over time."""
    return Panel(title, unit, targets, about, stacked=stacked)


def stat(title: str, unit: str, *targets: tuple[str, str], about: str) -> Panel:
    """The newest value, large."""
    return Panel(title, unit, targets, about, kind="stat")


def timeline(title: str, *targets: tuple[str, str], about: str) -> Panel:
    """States over time."""
    return Panel(title, "short", targets, about, kind="state-timeline")


def rate(metric: str, by: str = "", where: str = "") -> str:
    """A counter's growth per second, summed by labels."""
    grouped = f"sum by ({by})" if by else "sum"
    return f"{grouped} (rate({metric}{{@{',' if where else ''}{where}}}[{INTERVAL}]))"


def quantiles(metric: str, *shares: float, by: str = "", where: str = "") -> tuple[tuple[str, str], ...]:
    """Quantiles of a histogram, a line each."""
    inner = rate(f"{metric}_bucket", f"le, {by}" if by else "le", where)
    legend = "".join(f"{{{{{label.strip()}}}}} " for label in by.split(",") if label.strip())
    return tuple((f"histogram_quantile({share}, {inner})", f"{legend}p{share * 100:g}") for share in shares)


def runbook(name: str) -> str:
    """A link for a description."""
    return f"[Runbook]({RUNBOOKS}/{name}.md)."


def to_json(dashboard: Dashboard, others: Sequence[Dashboard]) -> Json:
    """A dashboard as Grafana reads it from a file."""
    return {
        "uid": dashboard.uid,
        "title": f"Ryzanstein / {dashboard.title}",
        "tags": ["ryzanstein"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": list(_variables(dashboard))},
        "annotations": {"list": list(_annotations())},
        "links": [_link(other) for other in others if other is not dashboard],
        "panels": list(_panels(dashboard)),
    }


def _variables(dashboard: Dashboard) -> Iterator[Json]:
    yield {"name": "datasource", "label": "Source", "type": "datasource", "query": "prometheus", "hide": 0}
    yield _variable("namespace", "namespace", "ryzanstein_build_info", "")
    yield _variable("release", "release", "ryzanstein_build_info", '{namespace=~"$namespace"}')
    for name, label, metric in dashboard.filters:
        yield _variable(name, label, metric, f"{{{SELECTOR}}}")


def _variable(name: str, label: str, metric: str, labels: str) -> Json:
    """All is `.*`, which also matches what has no such label: outside Kubernetes there is neither of the first two."""
    query = f"label_values({metric}{labels}, {label})"
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "variable"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _annotations() -> Iterator[Json]:
    """Marks on the time line of every panel: restarts and changes of phase."""
    for name, expr, title in (
        ("Restarts", "changes(process_start_time_seconds{@}[1m]) > 0", "{{component}} {{instance}} restarted"),
        ("Workers", 'changes(ryzanstein_worker_phase{@,phase="serving"}[1m]) > 0', "{{instance}} changed its phase"),
    ):
        yield {
            "name": name,
            "datasource": _DATASOURCE,
            "enable": True,
            "iconColor": "orange",
            "expr": expr.replace("{@", "{" + SELECTOR),
            "titleFormat": title,
            "step": "60s",
        }


def _link(other: Dashboard) -> Json:
    return {
        "title": other.title,
        "type": "link",
        "icon": "dashboard",
        "tooltip": "",
        "url": f"/d/{other.uid}",
        "tags": [],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
    }


def _panels(dashboard: Dashboard) -> Iterator[Json]:
    number, y = 0, 0
    for title, panels in dashboard.rows:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": title,
            "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
            "panels": [],
        }
        y += 1
        for place, panel in enumerate(panels):
            number += 1
            row, column = divmod(place, _COLUMNS)
            at = {"x": column * _WIDTH, "y": y + row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(number, panel, at)
        y += -(-len(panels) // _COLUMNS) * _HEIGHT


def _panel(number: int, panel: Panel, at: Json) -> Json:
    defaults: Json = {"unit": panel.unit}
    options: Json = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    if panel.kind == "timeseries":
        defaults |= {"min": 0, "custom": {"fillOpacity": 10, "showPoints": "never"}}
        if panel.stacked:
            defaults["custom"] |= {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value_and_name"}
    if panel.kind == "state-timeline":
        yes_no = {"0": {"text": "no", "color": "red"}, "1": {"text": "yes", "color": "green"}}
        defaults["mappings"] = [{"type": "value", "options": yes_no}]
        options |= {"mergeValues": True, "showValue": "never"}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": _DATASOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": _DATASOURCE,
                "expr": expr.replace("{@", "{" + SELECTOR),
                "legendFormat": legend,
            }
            for place, (expr, legend) in enumerate(panel.targets)
        ],
    }
