"""The operations guide: every process by itself, from environment variables alone, started in any order."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from services.cli.stack.default_model import TINY_MODEL
from services.common.ports import free_port
from tests.e2e.conftest import PROJECT
from tests.integration.router.processes import KillableRedis
from tests.stack import START_S

GUIDE = (PROJECT / "docs" / "operations.md").read_text()
ROW = re.compile(r"^\| (?P<name>[\w -]+) \| `python -m (?P<module>[\w.]+)` \| (?P<needs>.+) \|$", re.MULTILINE)
PROCESSES = {row["name"]: row for row in ROW.finditer(GUIDE)}


class ByHand:
    """An installation without `ryzanstein up`; nothing is set but what the guide says is needed, and ports.

    Each service is the user of Redis that it is in the chart.
    """

    def __init__(self, folder: Path) -> None:
        self.redis = KillableRedis(folder)
        self.ports = {name: free_port() for name in ("router", "KV-cache coordinator", "gateway")}
        self.variables = {
            "RYZANSTEIN_COORDINATOR_ADDRESS": f"127.0.0.1:{self.ports['KV-cache coordinator']}",
            "RYZANSTEIN_ROUTER_ADDRESSES": f"127.0.0.1:{self.ports['router']}",
            "RYZANSTEIN_MODEL": str(TINY_MODEL),
            "RYZANSTEIN_TENSOR_PARALLEL": "1",
            "RYZANSTEIN_WORKER_ID": "by-hand",
        }
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._folder = folder

    def start(self, name: str) -> None:
        if name == "Redis":
            self.redis.start()
            return
        row = PROCESSES[name]
        component = name.removeprefix("KV-cache ")
        variables = self.variables | {"RYZANSTEIN_REDIS_URL": self.redis.url_of(component)}
        needed = {variable: variables[variable] for variable in re.findall(r"`(RYZANSTEIN_\w+)`", row["needs"])}
        ports = {"router": "ROUTER_PORT", "KV-cache coordinator": "COORDINATOR_PORT", "gateway": "GATEWAY_PORT"}
        if name in ports:
            needed[f"RYZANSTEIN_{ports[name]}"] = str(self.ports[name])
        with (self._folder / f"{name}.log").open("wb") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", row["module"]], env=os.environ | needed, stdout=log, stderr=log, cwd=PROJECT
            )

    def answer(self) -> str:
        """A completion once there is one; the deadline covers the slowest start."""
        url, deadline = f"http://127.0.0.1:{self.ports['gateway']}/v1/completions", time.monotonic() + START_S
        body = {"prompt": "import ", "max_tokens": 8, "temperature": 0}
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.TransportError):
                answered = httpx.post(url, json=body, timeout=30)
                if answered.status_code == httpx.codes.OK:
                    return str(answered.json()["choices"][0]["text"])
            time.sleep(0.2)
        raise AssertionError(
            "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in self._folder.glob("*.log"))
        )

    def end(self, name: str) -> int:
        process = self.running.pop(name)
        process.send_signal(signal.SIGTERM)
        return process.wait(timeout=180)


@pytest.fixture
def by_hand(tmp_path: Path) -> Iterator[ByHand]:
    installation = ByHand(tmp_path)
    try:
        yield installation
    finally:
        for name in list(installation.running):
            installation.end(name)
        installation.redis.kill()


def test_the_guide_names_every_service() -> None:
    assert set(PROCESSES) == {"KV-cache coordinator", "router", "worker", "gateway"}


def test_services_started_in_the_worst_order_find_each_other(by_hand: ByHand) -> None:
    """In the guide's order `ryzanstein up` starts them."""
    for name in ("gateway", "worker", "router", "KV-cache coordinator", "Redis"):
        by_hand.start(name)
    assert by_hand.answer()
    assert {by_hand.end(name) for name in ("gateway", "worker", "router", "KV-cache coordinator")} == {0}
