"""The dashboards' panels, and whether a Prometheus has something for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Set
from typing import Any

from tests.unit.monitoring.exported import dashboards

Query = Callable[[str], list[dict[str, Any]]]
# Those of what the tests' loads do not do: lose streams, wait, have limits, pull blocks from another worker or keep
# them below the devices, use TLS, have prices; and of counters that not
# every machine has.
EVENTS = frozenset(
    {
        "rz-overview: Pauses that clients saw",
        "rz-gateway: Time at Redis",
        "rz-router: Wait in the queue",
        "rz-kv: Speed of a pull",
        "rz-workers: Time of a load",
        "rz-pods: Certificate ends in",
        "rz-overview: Canaries",
        *("rz-usage: Power", "rz-usage: Power by tenant", "rz-usage: Energy of a generated token"),
        *("rz-usage: Cost", "rz-usage: Cost by tenant", "rz-usage: Cost by model"),
        *("rz-kv: Blocks below the device", "rz-kv: Bytes kept", "rz-kv: Blocks not kept or not loaded"),
        *("rz-kv: Bytes to and from them", "rz-kv: Speed of a load"),
        *("rz-router: Demand", "rz-router: Replicas", "rz-router: Changes, by reason"),  # pools that routers scale
    }
)


def panels(without: Set[str] = frozenset()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each with its dashboard's id and its title, but those of dashboards with these ids."""
    for dashboard in dashboards():
        for panel in dashboard["panels"]:
            if panel["type"] != "row" and dashboard["uid"] not in without:
                yield f"{dashboard['uid']}: {panel['title']}", panel


def shows(panel: dict[str, Any], query: Query, interval: str = "10s") -> bool:
    """Whether any of its queries has a number, asked by `query`, for every value of the dashboard's variables."""
    for target in panel["targets"]:
        expr = target["expr"].replace("$__rate_interval", interval)
        for name in ("namespace", "release", "model", "pool", "component"):
            expr = expr.replace(f'"${name}"', '".*"')
        if any(not math.isnan(float(series["value"][1])) for series in query(expr)):
            return True
    return False
