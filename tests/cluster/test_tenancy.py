"""Keys, limits and quotas through the ingress: two gateways count together, and tenants know nothing of each other."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

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
# Each one's key is its name.
TENANTS: list[dict[str, Any]] = [
    {"name": "limited", "requests_per_minute": 6},
    {"name": "budgeted", "tokens_per_month": 30},
    {"name": "free"},
    {"name": "stranger"},
]


@pytest.fixture(scope="module")
def keyed(namespaces: Namespaces, ingress: str) -> Installation:
    installation = Installation(namespaces("tenancy"))
    entries = [{"key_sha256": digest(tenant["name"]), **tenant} for tenant in TENANTS]
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}}
    installation.kube.apply({**secret, "stringData": {"keys.json": json.dumps(entries)}})
    installation.install(*settings(VALUES), f'--set-json=ingress.hosts={{"{HOST}": {{}}}}')
    installation.kube.until("the ingress knows the route", lambda: ask(ingress, "free").is_success)
    return installation


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def call(ingress: str, method: str, path: str, key: str, body: Any = None) -> httpx.Response:
    """On a connection of its own: any gateway may answer."""
    headers = {"host": HOST} | ({"authorization": f"Bearer {key}"} if key else {})
    return httpx.request(method, f"{ingress}{path}", json=body, headers=headers, timeout=60)


def ask(ingress: str, key: str) -> httpx.Response:
    body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 8, "ignore_eos": True}
    return call(ingress, "POST", "/v1/completions", key, body)


@pytest.mark.parametrize("key", ["", "unknown"])
def test_a_key_is_needed(keyed: Installation, ingress: str, key: str) -> None:
    answer = ask(ingress, key)
    assert answer.status_code == httpx.codes.UNAUTHORIZED
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_gateways_count_together(keyed: Installation, ingress: str) -> None:
    """A limit is the tenant's, whichever gateway answers; others are not slowed by it."""
    (limit,) = [tenant["requests_per_minute"] for tenant in TENANTS if tenant["name"] == "limited"]
    answers = [ask(ingress, "limited") for _ in range(limit)]
    left = [int(answer.raise_for_status().headers["x-ratelimit-remaining-requests"]) for answer in answers]
    assert left == list(range(limit - 1, -1, -1))
    refused = ask(ingress, "limited")
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert ask(ingress, "free").is_success
