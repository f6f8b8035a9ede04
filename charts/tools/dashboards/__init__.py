"""The dashboards of Grafana as descriptions; :func:`made` writes them as JSON."""

from __future__ import annotations

import json

from charts.tools.dashboards import gateway, kubernetes, kv, overview, pods, router, usage, workers
from charts.tools.dashboards.grafana import Dashboard, to_json

DASHBOARDS: tuple[Dashboard, ...] = (
    overview.DASHBOARD,
    gateway.DASHBOARD,
    usage.DASHBOARD,
    router.DASHBOARD,
    kv.DASHBOARD,
    workers.DASHBOARD,
    pods.DASHBOARD,
    kubernetes.DASHBOARD,
)


def made() -> dict[str, str]:
    """Every dashboard's JSON by its uid."""
    return {each.uid: json.dumps(to_json(each, DASHBOARDS), indent=1) + "\n" for each in DASHBOARDS}
