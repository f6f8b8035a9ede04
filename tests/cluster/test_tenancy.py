"""Keys, limits and quotas through the ingress: two gateways count together, and tenants know nothing of each other."""

from __future__ import annotations

import json
import time
from hashlib import sha256
from typing import Any

import httpx
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.in_pods import METRICS
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
PAST_MEMORY_S = 1.2  # what a gateway remembers of a key counts for a second


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


def test_a_month_is_spent(keyed: Installation, ingress: str) -> None:
    """What a tenant used is counted in Redis and in the metrics; at the quota's end nothing is promised for later."""
    used, month = 0, time.strftime("%Y%m", time.gmtime())
    name = f"rz:{keyed.kube.namespace}-{keyed.release}:quota:budgeted:{month}"
    while (answer := ask(ingress, "budgeted")).is_success:
        used += answer.json()["usage"]["total_tokens"]
        assert used <= 30, "more than the month has"
        counted = f"{used} tokens are counted, which an answer does not wait for"
        keyed.kube.until(counted, lambda: keyed.redis(f"get {name}") == str(used), 5)  # noqa: B023
    assert used
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "insufficient_quota")
    assert "retry-after" not in answer.headers
    keyed.kube.until("the metrics count the same", lambda: tokens(keyed, "budgeted") == used, 5)


def tokens(installation: Installation, tenant: str) -> float:
    """Of prompts and answers, of all gateways together."""
    pods = [pod["metadata"]["name"] for pod in installation.pods("gateway")]
    lines = [line for pod in pods for line in installation.kube.exec(pod, "python", "-c", METRICS).splitlines()]
    ours = [
        line for line in lines if line.startswith("ryzanstein_gateway_tokens_total") and f'tenant="{tenant}"' in line
    ]
    return sum(float(line.split()[-1]) for line in ours if 'kind="cached"' not in line)


def test_a_conversation_is_its_tenants(keyed: Installation, ingress: str) -> None:
    body = {"model": "ryzanstein-tiny", "input": "Hi", "max_output_tokens": 8}
    first = call(ingress, "POST", "/v1/responses", "free", body).raise_for_status().json()
    assert call(ingress, "GET", f"/v1/responses/{first['id']}", "free").is_success
    assert call(ingress, "GET", f"/v1/responses/{first['id']}", "stranger").status_code == httpx.codes.NOT_FOUND
    further = {**body, "previous_response_id": first["id"]}
    assert call(ingress, "POST", "/v1/responses", "free", further).is_success
    assert call(ingress, "POST", "/v1/responses", "stranger", further).is_client_error


def test_a_key_that_is_taken_away(keyed: Installation, ingress: str) -> None:
    """Keys in Redis come and go without a restart, for every gateway within a second."""
    name = f"rz:{keyed.kube.namespace}-{keyed.release}:key:{digest('guest')}"
    assert ask(ingress, "guest").status_code == httpx.codes.UNAUTHORIZED
    keyed.redis(f"""set {name} '{json.dumps({"name": "guest"})}'""")
    time.sleep(PAST_MEMORY_S)
    assert all(ask(ingress, "guest").is_success for _ in range(6))
    keyed.redis(f"del {name}")
    time.sleep(PAST_MEMORY_S)
    assert {ask(ingress, "guest").status_code for _ in range(6)} == {401}
