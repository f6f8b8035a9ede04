"""Keys through the ingress: a release with tenancy answers for the keys of its Secret alone."""

from __future__ import annotations

import json
from hashlib import sha256

import httpx
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation

pytestmark = pytest.mark.timeout(300)
HOST = "keys.test"
VALUES = {
    "gateway.replicas": 2,
    "gateway.tenancy.enabled": "true",
    "gateway.tenancy.keysSecret.name": "keys",
    "workers.defaults.resources.requests.cpu": "100m",
    "ingress.enabled": "true",
    "ingress.className": "traefik",
    "ingress.controller": "traefik",
}
TENANT = "free"  # and its key


@pytest.fixture(scope="module")
def keyed(namespaces: Namespaces, ingress: str) -> Installation:
    installation = Installation(namespaces("tenancy"))
    entries = [{"key_sha256": sha256(TENANT.encode()).hexdigest(), "name": TENANT}]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}}
    installation.kube.apply({**secret, "stringData": {"keys.json": json.dumps(entries)}})
    installation.install(*settings(VALUES), f'--set-json=ingress.hosts={{"{HOST}": {{}}}}')
    installation.kube.until("the ingress knows the route", lambda: ask(ingress, TENANT).is_success)
    return installation


def ask(ingress: str, key: str) -> httpx.Response:
    """On a connection of its own: any gateway may answer."""
    body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 8, "ignore_eos": True}
    headers = {"host": HOST} | ({"authorization": f"Bearer {key}"} if key else {})
    return httpx.post(f"{ingress}/v1/completions", json=body, headers=headers, timeout=60)


@pytest.mark.parametrize("key", ["", "unknown"])
def test_a_key_is_needed(keyed: Installation, ingress: str, key: str) -> None:
    answer = ask(ingress, key)
    assert answer.status_code == httpx.codes.UNAUTHORIZED
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
