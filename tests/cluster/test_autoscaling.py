"""Gateways follow their CPU, as metrics-server measures it."""

from __future__ import annotations

import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.kube import Kube, KubeCommandError
from tests.cluster.load import ClusterLoad, Traffic
from tests.programs import left_out

pytestmark = pytest.mark.timeout(600)
VALUES = {
    "gateway.autoscaling.mode": "hpa-cpu",
    "gateway.autoscaling.min": 1,
    "gateway.autoscaling.max": 2,
    "gateway.autoscaling.scaleDownAfterSeconds": 15,
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "100m",
}
MEASURED_S = 240  # metrics are some scrapes old, and the autoscaler looks every 15 s


@pytest.fixture(scope="module")
def scaled(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("autoscaling"))
    try:
        installation.kube.kubectl("get", "--raw", "/apis/metrics.k8s.io/v1beta1/nodes")
    except KubeCommandError as error:
        left_out(f"the cluster has no metrics-server: {error}")
    installation.install(*settings(VALUES))
    return installation


def wanted(kube: Kube) -> int:
    return int(kube.get("horizontalpodautoscaler", "ryzanstein-gateway")["status"].get("desiredReplicas", 0))


def measures(kube: Kube) -> bool:
    """Whether it knows the CPU of its pods."""
    status = kube.get("horizontalpodautoscaler", "ryzanstein-gateway")["status"]
    return any(metric.get("resource", {}).get("current") for metric in status.get("currentMetrics") or ())


def test_gateways_follow_their_load(scaled: Installation, figures: dict[str, object]) -> None:
    """A start also takes CPU: the test begins once it is over."""
    kube = scaled.kube
    kube.until("one idle gateway", lambda: measures(kube) and wanted(kube) == 1, MEASURED_S, every_s=2)
    traffic = Traffic.undisturbed(scaled.url, streams=24, shorts=8)
    with ClusterLoad(traffic) as load:
        kube.until("a second gateway is asked for", lambda: wanted(kube) == 2, MEASURED_S, every_s=2)
        scaled.wait_ready()
        assert len(scaled.pods("gateway")) == 2
    load.assert_unharmed()
    figures["gateways scaled by load"] = load.figures()
    kube.until("one gateway is enough", lambda: len(scaled.pods("gateway")) == 1, MEASURED_S, every_s=2)
