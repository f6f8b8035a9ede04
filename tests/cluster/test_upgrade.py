"""From the chart and the images of an earlier revision to these and back, under load."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.kube import REPOSITORY
from tests.cluster.load import Load, Traffic
from tests.programs import required

pytestmark = pytest.mark.timeout(400)
# `tests/cluster/previous` builds them.
PREVIOUS = Path(os.environ.get("RYZANSTEIN_TEST_PREVIOUS", "build/previous"))
VALUES = {
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "100m",
    "gateway.replicas": 2,
    "router.replicas": 2,
}


TARGETS = ("gateway", "router", "kv-coordinator", "worker-cpu")


@pytest.fixture(scope="module")
def chart() -> Path:
    """The earlier revision's."""
    chart = PREVIOUS / "chart"
    if not chart.is_dir():
        assert not required(), f"no earlier revision is in {PREVIOUS}"
        pytest.skip(f"no earlier revision is in {PREVIOUS}: run tests/cluster/previous")
    return chart


@pytest.mark.parametrize("major", [pytest.param(3, marks=pytest.mark.smoke), 4])
def test_there_and_back(chart: Path, namespaces: Namespaces, figures: dict[str, object], major: int) -> None:
    installation = Installation(namespaces(f"upgrade-{major}"))
    installation.install(*settings({**VALUES, "image.tag": "previous"}), chart=chart, major=major)
    traffic = Traffic.undisturbed(installation.url, streams=8, tokens=150)
    with Load(traffic) as load:
        installation.install(*settings(VALUES), "--reset-values", major=major)
        time.sleep(5)
        installation.kube.helm("rollback", installation.release, "1", major=major)
        installation.wait_ready()
    figures[f"upgrade and rollback, Helm {major}"] = load.figures()
    load.assert_unharmed()
    assert not any(count for name, count in installation.kube.restarts().items() if "-secrets-" not in name)


def test_neighbouring_versions_serve_together(chart: Path, namespaces: Namespaces) -> None:
    """One component at a time is the earlier one, among today's: what is in between during every upgrade."""
    installation = Installation(namespaces("mixed"))
    installation.install(*settings(VALUES))
    expected = Traffic.undisturbed(installation.url, streams=6, tokens=60).expected
    for target in TARGETS:
        mixed = {**VALUES, f"image.references.{target}": f"{REPOSITORY}:{target}-previous"}
        installation.install(*settings(mixed), "--reset-values")
        assert Traffic.undisturbed(installation.url, streams=6, tokens=60).expected == expected, target
    assert not any(count for name, count in installation.kube.restarts().items() if "-secrets-" not in name)
