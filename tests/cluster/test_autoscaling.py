"""Gateways follow their CPU, as metrics-server measures it; routers scale a pool of workers from zero and back."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.kube import CommandError, Kube
from tests.cluster.load import Load, Traffic
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
# Two routers: the request is held by any, and one of them leads.
AT_ZERO = {
    "router.replicas": 2,
    "workers.defaults.autoscaling.mode": "builtin",
    "workers.defaults.autoscaling.min": 0,
    "workers.defaults.autoscaling.max": 2,
    "workers.defaults.autoscaling.idleSeconds": 15,
    "workers.defaults.autoscaling.scaleDownAfterSeconds": 15,
    "workers.defaults.resources.requests.cpu": "100m",
}
COLD_REQUESTS = 6
COLD_S = 240
MEASURED_S = 240  # metrics are some scrapes old, and the autoscaler looks every 15 s


@pytest.fixture(scope="module")
def scaled(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("autoscaling"))
    try:
        installation.kube.kubectl("get", "--raw", "/apis/metrics.k8s.io/v1beta1/nodes")
    except CommandError as error:
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
    """A start takes CPU, too: the test begins once it is over."""
    kube = scaled.kube
    kube.until("one idle gateway", lambda: measures(kube) and wanted(kube) == 1, MEASURED_S, every_s=2)
    traffic = Traffic.undisturbed(scaled.url, streams=24, shorts=8)
    with Load(traffic) as load:
        kube.until("a second gateway is asked for", lambda: wanted(kube) == 2, MEASURED_S, every_s=2)
        scaled.wait_ready()
        assert len(scaled.pods("gateway")) == 2
    load.assert_unharmed()
    figures["gateways scaled by load"] = load.figures()
    kube.until("one gateway is enough", lambda: len(scaled.pods("gateway")) == 1, MEASURED_S, every_s=2)


@pytest.fixture(scope="module")
def cold(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("cold"))
    installation.install(*settings(AT_ZERO))
    return installation


def pool(kube: Kube) -> int:
    """The replicas that the pool shall have."""
    return int(kube.get("statefulset", "ryzanstein-workers-default")["spec"]["replicas"])


async def ask_at_once(url: str) -> tuple[list[str], list[float]]:
    """Plain and streamed requests: what went wrong, and the seconds until each stream's first token."""
    wrong: list[str] = []
    first: list[float] = []
    began = time.monotonic()

    async def plain(client: httpx.AsyncClient) -> None:
        body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 4}
        answer = await client.post("/v1/completions", json=body, headers={"x-ryzanstein-patience": str(COLD_S)})
        if answer.status_code != 200:
            wrong.append(f"{answer.status_code}: {answer.text}")

    async def streamed(client: httpx.AsyncClient) -> None:
        body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 4, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            data: list[str] = []
            async for line in answer.aiter_lines():
                if '"text"' in line and not any('"text"' in earlier for earlier in data):
                    first.append(time.monotonic() - began)
                data += [line] if line.startswith("data:") else []
        if answer.status_code != 200 or data[-1:] != ["data: [DONE]"] or any('"error"' in line for line in data):
            wrong.append(f"{answer.status_code}: {data[-2:]}")

    async with httpx.AsyncClient(base_url=url, timeout=COLD_S, trust_env=False) as client:
        await asyncio.gather(*(ask(client) for ask in (plain, streamed) for _ in range(COLD_REQUESTS)))
    return wrong, first


def test_pool_at_zero_serves_all_requests_and_returns_to_zero(cold: Installation, figures: dict[str, object]) -> None:
    kube = cold.kube
    kube.until("the pool is at zero", lambda: pool(kube) == 0 and not cold.pods("worker"), COLD_S, every_s=1)
    wrong, first = asyncio.run(ask_at_once(cold.url))
    assert wrong == []
    assert len(first) == COLD_REQUESTS
    figures["first token from zero"] = min(first)
    kube.until("the pool is at zero again", lambda: pool(kube) == 0, COLD_S, every_s=1)
    leaders = [pod["metadata"]["name"] for pod in cold.pods("router")]
    assert kube.get("lease", "ryzanstein-scaler")["spec"]["holderIdentity"] in leaders
