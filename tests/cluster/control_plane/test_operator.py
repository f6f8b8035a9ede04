"""monitoring.mode operator: objects of a Prometheus operator, which the API server knows or Helm refuses."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cluster.conftest import Namespaces
from tests.cluster.control_plane.releases import RESTRICTED, install, owned, upgrade
from tests.cluster.kube import CommandError, Kube, Object

OPERATOR = ("monitoring.mode=operator", "monitoring.operator.labels.release=theirs")
CRDS = {"PodMonitor": "podmonitors", "PrometheusRule": "prometheusrules"}
OURS = {"PodMonitor ryzanstein", "PrometheusRule ryzanstein"}
COMPONENTS = ("gateway", "router", "coordinator", "worker")


@pytest.fixture(scope="module")
def kube(namespaces: Namespaces) -> Kube:
    return namespaces("operator", RESTRICTED)


def known(kube: Kube) -> list[Object]:
    """The definitions of both kinds that the cluster has."""
    return [each for each in kube.items("customresourcedefinitions") if each["spec"]["names"]["kind"] in CRDS]


def definition(kind: str, plural: str) -> Object:
    """The least that an API server takes."""
    anything = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    schema = {"openAPIV3Schema": {"type": "object", "properties": {"spec": anything}}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.monitoring.coreos.com"},
        "spec": {
            "group": "monitoring.coreos.com",
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": schema}],
        },
    }


@contextmanager
def without_operator(kube: Kube) -> Iterator[None]:
    """Only on a cluster that was started for the tests: what others made of these kinds would go with them."""
    found = known(kube)
    if found and not os.environ.get("RYZANSTEIN_TEST_RIG"):
        pytest.skip("this cluster has a Prometheus operator's definitions, and they may be in use")
    for each in found:
        kube.kubectl("delete", "customresourcedefinition", each["metadata"]["name"])
    try:
        yield
    finally:
        for each in found:
            bare = {"name": each["metadata"]["name"], "annotations": each["metadata"].get("annotations", {})}
            kube.apply(
                {"apiVersion": each["apiVersion"], "kind": each["kind"], "metadata": bare, "spec": each["spec"]},
                args=("--server-side",),
            )


@contextmanager
def with_operator(kube: Kube) -> Iterator[None]:
    """With the definitions that the cluster has, or the least there can be."""
    there = {each["spec"]["names"]["kind"] for each in known(kube)}
    made = [definition(kind, plural) for kind, plural in CRDS.items() if kind not in there]
    names = [f"customresourcedefinition/{plural}.monitoring.coreos.com" for plural in CRDS.values()]
    if made:
        kube.apply(*made)
    try:
        kube.wait(*names, condition="condition=Established")
        yield
    finally:
        for each in made:
            kube.kubectl("delete", "customresourcedefinition", each["metadata"]["name"])


def objects(kube: Kube) -> list[Object]:
    return kube.items("podmonitors,prometheusrules", "app.kubernetes.io/instance=ryzanstein")


def test_monitor_selects_exactly_the_pods_with_metrics(kube: Kube) -> None:
    """Both kinds come with the mode and go with it; the monitor selects every pod that has metrics, and no other."""
    with with_operator(kube):
        install(kube)
        assert objects(kube) == []
        upgrade(kube, *OPERATOR)
        found = {f"{each['kind']} {each['metadata']['name']}": each for each in objects(kube)}
        assert found.keys() == OURS
        assert all(each["metadata"]["labels"]["release"] == "theirs" for each in found.values())
        spec = found["PodMonitor ryzanstein"]["spec"]
        kube.until("pods of every component", lambda: all(kube.pods(component) for component in COMPONENTS))
        chosen = kube.items("pods", ",".join(f"{k}={v}" for k, v in spec["selector"]["matchLabels"].items()))
        ports = {endpoint["port"] for endpoint in spec["podMetricsEndpoints"]}
        scraped = {component(pod) for pod in chosen if ports & names_of_ports(pod)}
        assert scraped == set(COMPONENTS)
        assert json.dumps(found["PrometheusRule ryzanstein"]["spec"]).count('"alert"') > 20
        upgrade(kube)
        assert objects(kube) == []
        kube.helm("uninstall", "ryzanstein")


def component(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def names_of_ports(pod: Object) -> set[str]:
    return {port["name"] for container in pod["spec"]["containers"] for port in container.get("ports", ())}


@pytest.mark.parametrize("major", [3, 4])
def test_pod_monitor_is_rejected_without_an_operator(namespace: Kube, major: int) -> None:
    """By the kind's name, before anything is made."""
    with without_operator(namespace):
        with pytest.raises(CommandError, match="PodMonitor") as refusal:
            install(namespace, *OPERATOR, major=major)
        assert "monitoring.coreos.com" in str(refusal.value)
        assert owned(namespace) == {}
