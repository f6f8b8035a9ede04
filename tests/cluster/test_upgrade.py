"""From the chart and the images of an earlier revision to these and back, under load."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.kube import Object
from tests.cluster.load import ClusterLoad, Traffic

pytestmark = pytest.mark.timeout(400)
VALUES = {
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "100m",
    "gateway.replicas": 2,
    "router.replicas": 2,
}
# Both speak it from the beginning; the way from plain text takes several upgrades.
SECURED = {**VALUES, "tls.mode": "generated", "tls.phase": "require"}
COMPONENTS = ("gateway", "router", "coordinator", "workers")


@pytest.mark.parametrize("major", [pytest.param(3, marks=pytest.mark.smoke), 4])
def test_there_and_back(earlier_chart: Path, namespaces: Namespaces, figures: dict[str, object], major: int) -> None:
    installation = Installation(namespaces(f"upgrade-{major}"))
    installation.install(*settings({**VALUES, "image.tag": "previous"}), chart=earlier_chart, major=major)
    traffic = Traffic.undisturbed(installation.url, streams=8, tokens=150)
    with ClusterLoad(traffic) as load:
        installation.install(*settings(VALUES), "--reset-values", major=major)
        time.sleep(5)
        installation.kube.helm("rollback", installation.release, "1", major=major)
        installation.wait_ready()
    figures[f"upgrade and rollback, Helm {major}"] = load.figures()
    load.assert_unharmed()
    assert not any(count for name, count in installation.kube.restarts().items() if "-secrets-" not in name)


def test_neighbouring_versions_serve_together(earlier_chart: Path, namespaces: Namespaces) -> None:
    """One component at a time is the earlier one, as its chart starts it, among today's: so it is in every upgrade."""
    installation = Installation(namespaces("mixed"))
    installation.install(*settings(SECURED))
    expected = Traffic.undisturbed(installation.url, streams=6, tokens=60).expected
    earlier = workloads(installation, earlier_chart)
    for component in COMPONENTS:
        name = installation.workload(component)
        installation.kube.kubectl("delete", name)
        installation.kube.apply(earlier[name])
        installation.wait_ready()
        assert Traffic.undisturbed(installation.url, streams=6, tokens=60).expected == expected, component
        installation.kube.kubectl("delete", name)
        installation.install(*settings(SECURED))
    assert not any(count for name, count in installation.kube.restarts().items() if "-secrets-" not in name)


def workloads(installation: Installation, chart: Path) -> dict[str, Object]:
    """The earlier revision's images of each workload, by name as kubectl knows it."""
    values = [*installation.common(chart), *settings({**SECURED, "image.tag": "previous"})]
    rendered = yaml.safe_load_all(installation.kube.helm("template", installation.release, str(chart), *values))
    wanted = [item for item in rendered if item and item["kind"] in ("Deployment", "StatefulSet")]
    return {f"{item['kind'].lower()}/{item['metadata']['name']}": item for item in wanted}
