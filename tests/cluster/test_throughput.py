"""Throughput by replicas, with ranks that only wait, so that the nodes of one machine do not share what limits them."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from services.worker.simulated.curve import DEFAULT_CURVE, StepCurve
from tests.cluster.conftest import Namespaces, settings
from tests.cluster.installation import Installation

pytestmark = pytest.mark.timeout(600)
RUNNING, SPEED = 4, 0.2  # requests of a step, which takes five times as long as on the curve: 35 ms
PACED = {
    "RYZANSTEIN_ENGINE": "simulated",
    "RYZANSTEIN_ENGINE_ARGS": json.dumps({"speed": SPEED}),
    "RYZANSTEIN_MAX_RUNNING": str(RUNNING),
}
VALUES: dict[str, object] = {
    "workers.defaults.topologySpread": "hard",  # a node for each worker
    "workers.defaults.resources.requests.cpu": "50m",
    "gateway.resources.requests.cpu": "20m",
}
CLIENTS, TOKENS = 24, 32  # three times as many as two workers compute at once
WARM_UP_S, MEASURED_S = 5.0, 30.0


async def tokens_per_second(url: str, name: str, seconds: float) -> float:
    """Tokens of the answers that end within a time, in which all clients ask without a pause."""
    tokens, end = 0, time.perf_counter() + seconds
    async with httpx.AsyncClient(timeout=120) as http:

        async def keep_asking(client: int) -> None:
            nonlocal tokens
            number = 0
            while time.perf_counter() < end:
                prompt, number = f"{name} {client} {number}: ", number + 1
                body = {"model": "ryzanstein-tiny", "prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True}
                answer = (await http.post(f"{url}/v1/completions", json=body)).raise_for_status().json()
                if time.perf_counter() < end:
                    tokens += answer["usage"]["completion_tokens"]

        await asyncio.gather(*map(keep_asking, range(CLIENTS)))
    return tokens / seconds


def measured(installation: Installation, name: str) -> float:
    """Tokens a second, once routers know all workers and their speeds."""
    asyncio.run(tokens_per_second(installation.url, f"before {name}", WARM_UP_S))
    return asyncio.run(tokens_per_second(installation.url, name, MEASURED_S))


def test_second_node_nearly_doubles_the_throughput(namespaces: Namespaces, figures: dict[str, object]) -> None:
    """The same load on one replica, then on two, one on each node."""
    installation = Installation(namespaces("paced"))
    kube = installation.kube
    nodes = {node["metadata"]["name"] for node in kube.items("nodes")}
    if len(nodes) < 2:
        pytest.skip("needs two nodes")
    installation.install(*settings(VALUES), f"--set-json=workers.defaults.env={json.dumps(PACED)}")
    one = measured(installation, "one")
    fastest = RUNNING / (StepCurve.read(DEFAULT_CURVE).seconds(RUNNING, 0.0, 0, 0.0) / SPEED)
    assert 0.5 * fastest < one <= 1.02 * fastest, "these ranks are not paced"
    kube.kubectl("scale", installation.workload("worker"), "--replicas=2")
    installation.wait_ready()
    assert len({pod["spec"]["nodeName"] for pod in installation.pods("worker")}) == 2
    two = measured(installation, "two")
    figures["tokens/s of one and two nodes"] = [round(one), round(two)]
    assert two >= 1.8 * one
