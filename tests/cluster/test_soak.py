"""Load for long, with a fault all the time: no request fails, no byte changes, memory stays what it was.

Left out unless ``RYZANSTEIN_SOAK_MINUTES`` says for how long; docs/soak.md has the table of the last run.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import pytest

from tests.cluster.conftest import SETTLE_S, Restarts
from tests.cluster.installation import Installation
from tests.cluster.kube import Object
from tests.cluster.load import Load, Traffic
from tests.cluster.rig import Rig

MINUTES = float(os.environ.get("RYZANSTEIN_SOAK_MINUTES", "0"))
EVERY_S = 20.0
AWAY_S = 8.0
# What a process may have gained at the end: caches fill, and nothing else.
GROWTH = 1.25
RESIDENT = (
    "import pathlib as p; print(sum(int(l.split()[1]) for l in p.Path('/proc/1/status').read_text().splitlines() "
    "if l.startswith('VmRSS')))"
)
pytestmark = [
    pytest.mark.skipif(not MINUTES, reason="RYZANSTEIN_SOAK_MINUTES says for how long"),
    pytest.mark.timeout(MINUTES * 60 + 900),
]


class Faults:
    """What happens, one after the other, as a seed has it."""

    def __init__(self, installed: Installation, rig: Rig, seed: int) -> None:
        self._installed = installed
        self._rig = rig
        self._rng = random.Random(seed)
        self.planted: Counter[str] = Counter()
        self._kinds: dict[str, Callable[[], None]] = {
            "worker pod deleted with force": lambda: self._delete("worker", force=True),
            "worker pod deleted": lambda: self._delete("worker", force=False),
            "rank killed": lambda: self._signal("worker", "services.worker.ranks", signal.SIGKILL),
            "worker frozen": lambda: self._signal("worker", "services.worker.server", signal.SIGSTOP),
            "router frozen": lambda: self._signal("router", "services.router", signal.SIGSTOP),
            "router pod deleted with force": lambda: self._delete("router", force=True),
            "coordinator pod deleted with force": lambda: self._delete("coordinator", force=True),
            "Redis' pod deleted with force": lambda: self._delete("redis", force=True),
            "gateways rolled out": lambda: self._installed.restart("gateway"),
        }
        if len(self._nodes()) > 1:
            self._kinds["cable pulled for 8 s"] = self._unplug

    def plant(self) -> None:
        """The next one, once everything is ready again after the last."""
        kind = self._rng.choice(list(self._kinds))
        self._kinds[kind]()
        self.planted[kind] += 1

    def _any(self, component: str) -> Object:
        return self._rng.choice(self._installed.pods(component))

    def _delete(self, component: str, *, force: bool) -> None:
        self._installed.delete(self._any(component), force=force)

    def _signal(self, component: str, module: str, signum: signal.Signals) -> None:
        self._rig.signal(self._any(component), module, signum)

    def _nodes(self) -> list[str]:
        return [node["metadata"]["name"] for node in self._installed.kube.items("nodes")]

    def _unplug(self) -> None:
        """Of a node without gateways: clients' connections end where a gateway ends."""
        taken = {pod["spec"]["nodeName"] for pod in self._installed.pods("gateway")}
        for node in set(self._nodes()[1:]) - taken:
            self._rig.unplug(node)
            time.sleep(AWAY_S)
            self._rig.plug_in(node)


def resident(installed: Installation) -> dict[str, int]:
    """KiB of each gateway's, router's and coordinator's process."""
    pods = [pod for component in ("gateway", "router", "coordinator") for pod in installed.pods(component)]
    names = [pod["metadata"]["name"] for pod in pods]
    return {name: int(installed.kube.exec(name, "python", "-c", RESIDENT)) for name in names}


def test_soak(
    installed: Installation, traffic: Traffic, rig: Rig, figures: dict[str, object], restarts: Restarts
) -> None:
    faults = Faults(installed, rig, seed=0)
    before = resident(installed)
    with Load(traffic) as load:
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end:
            began = time.monotonic()
            faults.plant()
            time.sleep(SETTLE_S)
            installed.wait_ready()
            time.sleep(max(0.0, EVERY_S - (time.monotonic() - began)))
    after = resident(installed)
    figures["soak"] = {"minutes": MINUTES, "faults": dict(faults.planted), **load.figures()}
    figures["soak, MiB"] = {name: (before.get(name, 0) // 1024, after[name] // 1024) for name in after}
    load.assert_unharmed()
    assert all(after[name] < before[name] * GROWTH for name in after.keys() & before.keys()), (before, after)
    frozen = sum(count for kind, count in faults.planted.items() if "frozen" in kind)
    assert sum(restarts().values()) <= frozen, restarts()
