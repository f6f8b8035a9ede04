"""A pool at zero: routers hold its requests, scale it up, and scale it down again.

``RYZANSTEIN_TEST_TURNS`` says how many times in a row, on one installation.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

import httpx
import pytest

from tests.cluster.conftest import SETTLE_S, Namespaces, settings
from tests.cluster.installation import Installation
from tests.cluster.kube import Kube

# Two of each: a request is held by any router, one of them leads, and each gateway has a survivor.
AT_ZERO = {
    "gateway.replicas": 2,
    "router.replicas": 2,
    "workers.defaults.autoscaling.mode": "builtin",
    "workers.defaults.autoscaling.min": 0,
    "workers.defaults.autoscaling.max": 2,
    "workers.defaults.autoscaling.idleSeconds": 10,
    "workers.defaults.autoscaling.scaleDownAfterSeconds": 5,
    "workers.defaults.resources.requests.cpu": "100m",
}
EACH = 6  # plain requests of a start, and streams
STARTS = 20
TURNS = int(os.environ.get("RYZANSTEIN_TEST_TURNS", "1"))
COLD_S = 240
CROWD, CROWD_S = 1000, 10
ROUNDING_S = 1  # Kubernetes writes whole seconds

Request = Callable[[httpx.AsyncClient], Awaitable[tuple[str, float]]]  # its failure, or "", and the time of its answer

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Burst:
    """Requests that were sent together; times are the clock's, in seconds."""

    failures: list[str]
    sent: list[float]
    answered: list[float]  # by request: the first token of a stream, the whole answer of a plain one


@pytest.fixture(scope="module")
def cold(namespaces: Namespaces) -> Installation:
    installation = Installation(namespaces("cold"))
    installation.install(*settings(AT_ZERO))
    return installation


@pytest.fixture(scope="module", autouse=True, params=range(1, TURNS + 1))
def turn(request: pytest.FixtureRequest) -> int:
    """All tests of the file run before the next turn."""
    number: int = request.param
    return number


def replicas(kube: Kube) -> int:
    """The replicas that the pool shall have."""
    return int(kube.get("statefulset", "ryzanstein-workers-default")["spec"]["replicas"])


def wait_for_zero(cold: Installation) -> None:
    kube = cold.kube
    kube.until("the pool is at zero", lambda: not replicas(kube) and not cold.pods("worker"), COLD_S, every_s=1)


def ready_at(cold: Installation) -> float:
    """When the first worker pod became ready, once one is."""

    def moments() -> list[float]:
        conditions = [condition for pod in cold.pods("worker") for condition in pod["status"]["conditions"]]
        ready = [each for each in conditions if (each["type"], each["status"]) == ("Ready", "True")]
        return [datetime.fromisoformat(each["lastTransitionTime"]).timestamp() for each in ready]

    cold.kube.until("a worker pod is ready", lambda: bool(moments()), COLD_S, every_s=0.5)
    return min(moments())


async def plain(client: httpx.AsyncClient) -> tuple[str, float]:
    body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 4}
    answer = await client.post("/v1/completions", json=body, headers={"x-ryzanstein-patience": str(COLD_S)})
    return "" if answer.status_code == 200 else f"{answer.status_code}: {answer.text}", time.time()


async def streamed(client: httpx.AsyncClient) -> tuple[str, float]:
    body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": 4, "stream": True}
    data: list[str] = []
    first = 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data:"):
                first = first or time.time()
                data.append(line)
    whole = answer.status_code == 200 and data[-1:] == ["data: [DONE]"] and not any('"error"' in line for line in data)
    return "" if whole else f"{answer.status_code}: {data[-2:]}", first


async def ask(url: str, kinds: list[Request], pause_s: float = 0) -> Burst:
    """Send a request of each kind, one after the other, without waiting for answers."""
    sent: list[float] = []
    limits = httpx.Limits(max_connections=None)

    async def one(position: int, kind: Request) -> tuple[str, float]:
        await asyncio.sleep(position * pause_s)
        sent.append(time.time())
        return await kind(client)

    async with httpx.AsyncClient(base_url=url, timeout=COLD_S, trust_env=False, limits=limits) as client:
        answers = await asyncio.gather(*(one(position, kind) for position, kind in enumerate(kinds)))
    return Burst([failure for failure, _ in answers if failure], sent, [moment for _, moment in answers])


def start(cold: Installation, disturb: Callable[[], object] = lambda: None) -> float:
    """Start the pool by plain and streamed requests; return the seconds from readiness to the first token."""
    wait_for_zero(cold)
    time.sleep(SETTLE_S)
    assert replicas(cold.kube) == 0, "the pool starts without a request"

    async def run() -> Burst:
        burst = asyncio.create_task(ask(cold.url, [plain, streamed] * EACH))
        await asyncio.sleep(1)
        await asyncio.to_thread(disturb)
        return await burst

    burst = asyncio.run(run())
    assert burst.failures == []
    return min(burst.answered[1::2]) - ready_at(cold)


@pytest.mark.timeout(120 * STARTS)
def test_cold_starts_lose_no_request(cold: Installation, turn: int, figures: dict[str, object]) -> None:
    after_ready = [start(cold) for _ in range(STARTS)]
    figures[f"first token after the pod's readiness, turn {turn}"] = {
        "median": round(statistics.median(after_ready), 2),
        "worst": round(max(after_ready), 2),
    }
    assert max(after_ready) <= 1 + ROUNDING_S
    wait_for_zero(cold)
    leaders = [pod["metadata"]["name"] for pod in cold.pods("router")]
    assert cold.kube.get("lease", "ryzanstein-scaler")["spec"]["holderIdentity"] in leaders


@pytest.mark.parametrize("component", ["gateway", "router"])
def test_cold_start_survives_a_restart(cold: Installation, component: str) -> None:
    """A gateway and a router end in an orderly way while requests wait for the pool."""
    start(cold, lambda: cold.delete(cold.pod(component)))
    cold.wait_ready()


def test_crowd_at_a_cold_pool_is_served_in_order(cold: Installation, turn: int, figures: dict[str, object]) -> None:
    wait_for_zero(cold)
    burst = asyncio.run(ask(cold.url, [plain] * CROWD, CROWD_S / CROWD))
    assert burst.failures == []
    waits = [answered - sent for sent, answered in zip(burst.sent, burst.answered, strict=True)]
    figures[f"crowd at a cold pool, turn {turn}"] = {
        "median": round(statistics.median(waits), 2),
        "worst": round(max(waits), 2),
    }
    tenth = CROWD // 10
    assert statistics.median(burst.answered[:tenth]) <= statistics.median(burst.answered[-tenth:])
