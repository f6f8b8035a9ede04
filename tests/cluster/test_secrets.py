"""A restricted namespace that gives pods a user of its own choice, and the password of Redis there."""

from __future__ import annotations

import base64
import time

import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.load import ClusterLoad, Traffic

pytestmark = pytest.mark.timeout(300)
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
UID = 1000650000
# As OpenShift's admission would set it.
VALUES = {
    "openshift": "true",
    "podDefaults.securityContext.runAsUser": UID,
    "podDefaults.securityContext.fsGroup": UID,
    "workers.defaults.replicas": 2,
    "workers.defaults.resources.requests.cpu": "100m",
}


@pytest.fixture(scope="module")
def arbitrary_uid(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("arbitrary-uid", labels=RESTRICTED))
    installation.install(*settings(VALUES))
    return installation


def password(installation: Installation, generation: int) -> bytes:
    secret = installation.kube.get("secret", f"{installation.release}-redis-auth-{generation}")
    return base64.b64decode(secret["data"]["password"])


def test_release_runs_under_any_user_id(arbitrary_uid: Installation) -> None:
    traffic = Traffic.undisturbed(arbitrary_uid.url, streams=4, tokens=20)
    assert all(answer.ids for answer in traffic.expected)
    for component in ("gateway", "router", "coordinator", "worker"):
        name = arbitrary_uid.pod(component)["metadata"]["name"]
        assert arbitrary_uid.kube.exec(name, "id", "-u").strip() == str(UID)
    assert not any(count for name, count in arbitrary_uid.kube.restarts().items() if "-secrets-" not in name)


def test_another_password_without_downtime(arbitrary_uid: Installation) -> None:
    traffic = Traffic.undisturbed(arbitrary_uid.url, streams=6, tokens=100, shorts=2)
    with ClusterLoad(traffic) as load:
        arbitrary_uid.install(*settings({**VALUES, "redis.auth.generation": 2}))
        time.sleep(2)
    load.assert_unharmed()
    assert password(arbitrary_uid, 2) != password(arbitrary_uid, 1)
