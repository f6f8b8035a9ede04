"""The table of metrics in the documentation is what running services export."""

from __future__ import annotations

import asyncio
import gc
import re
from contextlib import AsyncExitStack
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from services.common.metrics import serve_metrics
from services.common.ports import free_port
from tests.integration.gateway.gateways import running_stack
from tests.integration.router.processes import KillableRedis, coordinator_process, page, router_process, running
from tests.integration.worker_server.conftest import running_worker

TABLE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "metrics.md"
ROW = re.compile(r"\| `(?P<name>\w+)` \| (?P<type>\w+) \| (?P<labels>[^|]*) \|")

Metrics = dict[str, tuple[str, frozenset[str]]]  # type and labels by name


def documented() -> dict[str, Metrics]:
    """By service; what all services have is in each of them."""
    sections: dict[str, Metrics] = {}
    for section in TABLE.read_text().split("\n## ")[1:]:
        title, _, rows = section.partition("\n")
        sections[title] = {
            row["name"]: (row["type"], frozenset(re.findall(r"\w+", row["labels"]))) for row in ROW.finditer(rows)
        }
    common = sections.pop("All services")
    return {title: metrics | common for title, metrics in sections.items()}


def exported(text: str) -> dict[str, tuple[str, frozenset[str] | None]]:
    """Labels are None where there is no sample yet."""
    actual = {}
    for family in text_string_to_metric_families(text):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = [frozenset(sample.labels) - {"le"} for sample in family.samples]
        actual[name] = (family.type, labels[0] if labels else None)
    return actual


def check(service: str, text: str) -> None:
    table, seen = documented()[service], exported(text)
    assert {name: kind for name, (kind, _) in seen.items()} == {name: kind for name, (kind, _) in table.items()}
    for name, (_, labels) in seen.items():
        assert labels is None or labels == table[name][1], name


def require_frozen(text: str) -> None:
    """Without it, a full collection is a pause of up to 0.1 s in the middle of every stream."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    (frozen,) = [sample.value for sample in samples if sample.name == "ryzanstein_process_frozen_objects"]
    assert frozen > 10_000


async def test_metrics_table_equals_the_metrics_of_running_services(tmp_path: Path) -> None:
    redis = KillableRedis(tmp_path)
    redis.start()
    ports = {service: free_port() for service in ("Router", "KV-cache coordinator", "Worker")}
    async with AsyncExitStack() as stack:
        stack.callback(redis.kill)
        coordinator = coordinator_process(redis.url_of("coordinator"), METRICS_PORT=str(ports["KV-cache coordinator"]))
        stack.enter_context(running(coordinator))
        stack.enter_context(running(router_process(redis.url_of("router"), METRICS_PORT=str(ports["Router"]))))
        gc.unfreeze()  # the worker's server runs in this process
        await stack.enter_async_context(running_worker(redis.url, metrics_port=ports["Worker"]))
        for service, port in ports.items():
            text = await asyncio.to_thread(page, port)
            check(service, text)
            require_frozen(text)
        gateway = await stack.enter_async_context(running_stack())
        # As the gateway's process does around it; its own port has the same registry.
        stack.enter_context(serve_metrics("127.0.0.1", 0, gateway.gateway.metrics.registry, str))
        for body in ({"prompt": "a"}, {"prompt": 5}):
            await gateway.http.post("/v1/completions", json=body)
        check("Gateway", (await gateway.http.get("/metrics")).text)
