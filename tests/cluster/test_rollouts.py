"""Rollouts and other numbers of replicas, under load: no request fails, no byte changes."""

from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from tests.cluster.conftest import SHARED, Disturb, Restarts, settings
from tests.cluster.installation import Installation
from tests.cluster.load import SHORT_TOKENS

pytestmark = pytest.mark.timeout(600)
ROLLOUTS, SHORT_REQUESTS, CLIENTS = 10, 10_000, 8


@pytest.mark.parametrize("component", ["gateway", "router", "coordinator", "workers", "redis"])
def test_a_rollout(installed: Installation, disturbed: Disturb, component: str, restarts: Restarts) -> None:
    disturbed(lambda: installed.restart(component))
    assert not restarts()


def test_more_and_fewer_workers(installed: Installation, disturbed: Disturb) -> None:
    def scale(replicas: int) -> None:
        installed.install(*settings({**SHARED, "workers.defaults.replicas": replicas}))
        installed.kube.until("the pods are gone", lambda: len(installed.pods("worker")) == replicas)

    disturbed(*(lambda replicas=replicas: scale(replicas) for replicas in (4, 1, 3)))


@pytest.mark.timeout(1500)
def test_short_requests_through_the_ingress(
    installed: Installation, ingress: str, figures: dict[str, object], request: pytest.FixtureRequest
) -> None:
    """New connections all the time, while every gateway is replaced again and again."""
    body = {"model": "ryzanstein-tiny", "prompt": "def ", "max_tokens": SHORT_TOKENS, "temperature": 0}
    failures: list[str] = []
    answered = 0

    async def ask(over: asyncio.Event) -> None:
        nonlocal answered
        while not over.is_set() or answered < SHORT_REQUESTS:
            async with httpx.AsyncClient(base_url=ingress, timeout=60) as client:
                try:
                    answer = await client.post("/v1/completions", json=body)
                    failures.extend([f"{answer.status_code}: {answer.text[:200]}"] if answer.is_error else [])
                except httpx.HTTPError as error:
                    failures.append(f"{time.monotonic():.1f}: {error!r}")
            answered += 1

    def roll() -> None:
        for _ in range(ROLLOUTS):
            installed.restart("gateway")
            installed.wait_ready()

    async def main() -> None:
        over = asyncio.Event()
        async with asyncio.TaskGroup() as clients:
            for _ in range(CLIENTS):
                clients.create_task(ask(over))
            await asyncio.to_thread(roll)
            over.set()

    asyncio.run(main())
    figures[request.node.name] = {"requests": answered, "failed": len(failures), "rollouts": ROLLOUTS}
    assert not failures, failures[:10]
