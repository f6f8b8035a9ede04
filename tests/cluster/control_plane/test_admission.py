"""A real API server takes what every values file renders, in a namespace with restricted Pod Security."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.charts.rendering import ALL_VALUES, render
from tests.cluster.conftest import Namespaces
from tests.cluster.control_plane.releases import RESTRICTED, install, owned, rendered_names
from tests.cluster.kube import Kube, KubeCommandError

CARELESS_POD = """
apiVersion: v1
kind: Pod
metadata: {name: not-restricted}
spec: {containers: [{name: main, image: none}]}
"""


@pytest.fixture(scope="module")
def restricted(namespaces: Namespaces) -> Kube:
    return namespaces("restricted", RESTRICTED)


def with_accounts(kube: Kube) -> Kube:
    """With the accounts that pods of `helm test` name: the server looks for them even if nothing is really made."""
    for name in ("ryzanstein", "serving"):
        kube.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}})
    return kube


@pytest.fixture(scope="module")
def dry(namespaces: Namespaces) -> Kube:
    return with_accounts(namespaces("dry", RESTRICTED))


@pytest.fixture(scope="module")
def unrestricted(namespaces: Namespaces) -> Kube:
    """For pools that mount folders of the node, which the restricted standard forbids."""
    return with_accounts(namespaces("unrestricted"))


@pytest.mark.parametrize("values", ALL_VALUES, ids=lambda path: path.stem)
def test_every_values_file_is_admitted(dry: Kube, unrestricted: Kube, values: Path) -> None:
    """Custom kinds included; a field that the server does not know is an error, and so is a warning."""
    kube = unrestricted if "hostPath:" in render(values).text else dry
    text = render(values, namespace=kube.namespace).text
    args = ("--server-side", "--force-conflicts", "--dry-run=server", "--validate=strict", "--warnings-as-errors")
    kube.kubectl("apply", *args, "-f", "-", stdin=text)


def test_a_field_that_the_server_does_not_know_is_refused(dry: Kube) -> None:
    """The test above would hold of an API server that takes anything."""
    text = render(namespace=dry.namespace).text.replace("podManagementPolicy:", "podManagement:")
    with pytest.raises(KubeCommandError, match="podManagement"):
        dry.kubectl("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=text)


def test_the_namespace_would_refuse_a_careless_pod(restricted: Kube) -> None:
    with pytest.raises(KubeCommandError, match="violates PodSecurity"):
        restricted.kubectl("create", "--dry-run=server", "-f", "-", stdin=CARELESS_POD)


def test_pods_are_made_in_a_restricted_namespace(restricted: Kube) -> None:
    """Admission of a Deployment does not check its pods; the controllers' own creations are."""
    install(restricted)
    assert owned(restricted).keys() == rendered_names(restricted.namespace)
    components = ("gateway", "router", "coordinator", "worker", "redis", "secrets")
    restricted.until(
        "a pod of every component", lambda: all(restricted.pods(component) for component in components), 20
    )
    reasons = {event["reason"] for event in restricted.items("events")}
    assert "FailedCreate" not in reasons
