"""Load for long, with a fault all the time: no request fails, no byte changes, memory stays what it was.

Left out unless ``RYZANSTEIN_SOAK_MINUTES`` says for how long; docs/soak.md has the table of the last run. With
``RYZANSTEIN_SOAK_PICTURES`` pictures of the dashboards are left in that folder.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from bench.soaking.load import Served
from bench.soaking.memory import slope
from charts.tools.pictures import Source, pictures
from tests.cluster.conftest import SETTLE_S, SHARED, Restarts, settings
from tests.cluster.installation import Installation
from tests.cluster.kube import Object
from tests.cluster.load import ClusterLoad, Traffic
from tests.cluster.prometheus import Prometheus
from tests.cluster.rig import Rig
from tests.cluster.visitors import Visitors

MINUTES = float(os.environ.get("RYZANSTEIN_SOAK_MINUTES", "0"))
EVERY_S = 20.0
AWAY_S = 8.0
READY_S = 300.0
# Clients rest, so that the cluster's cores are not the only thing that is shown.
STREAMS, TOKENS, SHORTS, PAUSE_S = 8, 120, 3, 0.5
# Largest growth of a component's processes during the soak: caches fill, and nothing else.
GROWTH = 0.25
# Beside that: the segment that a worker's server shares with its ranks, whose pages count when they are first touched.
SHARED_MIB = {"worker": 33.0}
WARM_UP_S = 120.0
# Of what a soak need not do: lose a stream that has tokens, and wait in a router's queue.
CHANCE = {"rz-overview: Pauses that clients saw", "rz-router: Wait in the queue"}
# Bursts of long prompts wait in the routers' queues.
TIGHT = {**SHARED, "router.settings.saturationS": 2}
pytestmark = [
    pytest.mark.skipif(not MINUTES, reason="RYZANSTEIN_SOAK_MINUTES says for how long"),
    pytest.mark.timeout(MINUTES * 60 + 900),
]


@dataclass
class Faults:
    """The faults in their order: every kind once, in an order of the seed's, before any comes again."""

    installed: Installation
    rig: Rig
    rng: random.Random
    planted: list[tuple[str, float]] = field(default_factory=list)  # and when
    _next: list[str] = field(default_factory=list)

    def plant(self) -> None:
        """The next one."""
        kinds = self._kinds()
        self._next = self._next or self.rng.sample(list(kinds), len(kinds))
        kind = self._next.pop()
        self.planted.append((kind, time.monotonic()))
        kinds[kind]()

    def longest_pauses(self, served: list[Served]) -> dict[str, float]:
        """Of any client until the next fault came, by the kind of fault."""
        worst: dict[str, float] = {}
        bounds = [*(began for _, began in self.planted), time.monotonic()]
        for (kind, began), end in zip(self.planted, bounds[1:], strict=True):
            waits = [
                later - earlier
                for each in served
                if each.began < end and each.ended > began
                for earlier, later in pairwise([each.began, *each.arrivals])
                if earlier < end and later > began
            ]
            worst[kind] = round(max(worst.get(kind, 0.0), *waits), 2)
        return worst

    def _kinds(self) -> dict[str, Callable[[], None]]:
        kinds: dict[str, Callable[[], None]] = {
            "worker pod deleted with force": lambda: self._delete("worker", force=True),
            "worker pod deleted": lambda: self._delete("worker", force=False),
            "rank killed": lambda: self._signal("worker", "services.worker.rank", signal.SIGKILL),
            "worker frozen": lambda: self._signal("worker", "services.worker", signal.SIGSTOP),
            "router frozen": lambda: self._signal("router", "services.router", signal.SIGSTOP),
            "router pod deleted with force": lambda: self._delete("router", force=True),
            "coordinator pod deleted with force": lambda: self._delete("coordinator", force=True),
            "Redis' pod deleted with force": lambda: self._delete("redis", force=True),
            "gateways rolled out": lambda: self.installed.restart("gateway"),
        }
        if len(self._nodes()) > 1:
            kinds["cable pulled for 8 s"] = self._unplug
        return kinds

    def _any(self, component: str) -> Object:
        return self.rng.choice(self.installed.pods(component))

    def _delete(self, component: str, *, force: bool) -> None:
        self.installed.delete(self._any(component), force=force)

    def _signal(self, component: str, module: str, signum: signal.Signals) -> None:
        self.rig.signal(self._any(component), module, signum)

    def _nodes(self) -> list[str]:
        return [node["metadata"]["name"] for node in self.installed.kube.items("nodes")]

    def _unplug(self) -> None:
        """Of a node without gateways: clients' connections end where a gateway ends."""
        taken = {pod["spec"]["nodeName"] for pod in self.installed.pods("gateway")}
        for node in set(self._nodes()[1:]) - taken:
            self.rig.unplug(node)
            time.sleep(AWAY_S)
            self.rig.plug_in(node)


def growths(prometheus: Prometheus, start: float, end: float) -> dict[str, dict[str, float]]:
    """By component: MiB that its processes have, and gain an hour, their first minutes left out."""
    samples: dict[str, dict[tuple[str, float], list[tuple[float, float]]]] = {}
    # A pod's series go on when its container is restarted; the process is another one.
    sent = {"start": str(start), "end": str(end), "step": "15"}
    begun = {
        (series["metric"]["instance"], at): float(value)
        for series in prometheus.ask("query_range", query="process_start_time_seconds", **sent)["result"]
        for at, value in series["values"]
    }
    for series in prometheus.ask("query_range", query="process_resident_memory_bytes", **sent)["result"]:
        instance, lives = series["metric"]["instance"], samples.setdefault(series["metric"]["component"], {})
        for at, value in series["values"]:
            began = begun.get((instance, at))
            if began is not None and at - began > WARM_UP_S:
                lives.setdefault((instance, began), []).append((at, float(value) / 2**20))
    return {
        component: {
            "MiB": round(max(value for life in lives.values() for _, value in life), 1),
            "MiB an hour": round(slope(list(lives.values())) or 0.0, 1),
        }
        for component, lives in samples.items()
        if lives
    }


def test_soak(
    installed: Installation,
    rig: Rig,
    figures: dict[str, object],
    restarts: Restarts,
    tmp_path: Path,
) -> None:
    installed.install(*settings(TIGHT))
    traffic = Traffic.undisturbed(installed.url, streams=STREAMS, tokens=TOKENS, shorts=SHORTS)
    faults = Faults(installed, rig, random.Random(0))
    start = time.time()
    with ClusterLoad(traffic, PAUSE_S) as load, Visitors(traffic.url) as visitors:
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end:
            began = time.monotonic()
            faults.plant()
            time.sleep(SETTLE_S)
            installed.wait_ready(READY_S)
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
    planted = Counter(kind for kind, _ in faults.planted)
    figures["soak"] = {"minutes": MINUTES, "visits": visitors.visits, **load.figures()}
    worst = faults.longest_pauses(load.served)
    figures["soak, faults: times, longest pause"] = {kind: (count, worst[kind]) for kind, count in planted.items()}
    with installed.kube.forward(f"{installed.release}-prometheus", 9090) as url:
        figures["soak, memory"] = memory = growths(Prometheus(url), start, time.time())
        folder = Path(os.environ.get("RYZANSTEIN_SOAK_PICTURES") or tmp_path)
        figures["soak, panels without anything"] = empty = pictures(Source(url, start, time.time()), folder)
    load.assert_unharmed()
    assert not visitors.failures, f"{len(visitors.failures)} of {visitors.visits} visits: {visitors.failures[:10]}"
    for component, each in memory.items():
        gained, may_gain = each["MiB an hour"] * MINUTES / 60, GROWTH * each["MiB"] + SHARED_MIB.get(component, 0.0)
        assert gained < may_gain, f"{component}: {memory}"
    frozen = sum(count for kind, count in planted.items() if "frozen" in kind)
    assert sum(restarts().values()) <= frozen, restarts()
    assert set(empty) <= CHANCE
