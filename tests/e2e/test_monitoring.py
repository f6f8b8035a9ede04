"""A real Prometheus scrapes real services: every rule is evaluated, every panel shows something; Jaeger has traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml

from services.common.ports import free_port
from tests.integration.router.processes import KillableRedis, coordinator_process, router_process, running
from tests.programs import CHART, answers, program
from tests.stack import ryzanstein
from tests.unit.monitoring.exported import rules
from tests.unit.monitoring.panels import EVENTS, panels, shows

MODEL = str(Path(__file__).parents[2] / "models" / "ryzanstein-tiny")
COMPONENTS = ("gateway", "router", "coordinator", "worker")
OF_OTHERS = {"rz-k8s"}
# The worker here has a host cache, a gateway counts canaries from 0, and its models have prices.
EMPTY = EVENTS - {
    *("rz-kv: Blocks below the device", "rz-kv: Bytes kept", "rz-kv: Blocks not kept or not loaded"),
    *("rz-kv: Bytes to and from them", "rz-overview: Canaries"),
    *("rz-usage: Cost", "rz-usage: Cost by tenant", "rz-usage: Cost by model"),
}
IN_FLIGHT = 'ryzanstein_gateway_in_flight_requests{api="rest",route="/v1/completions"} 1.0'


@dataclass(frozen=True)
class Watched:
    """Where they listen."""

    gateway: str
    prometheus: str
    jaeger: str
    redis: KillableRedis
    worker: int  # its process

    def query(self, expr: str) -> list[dict[str, Any]]:
        answer = httpx.get(f"{self.prometheus}/api/v1/query", params={"query": expr}, timeout=60).json()
        assert answer["status"] == "success", f"{expr}: {answer}"
        actual: list[dict[str, Any]] = answer["data"]["result"]
        return actual


def wait(what: str, true: Any, within_s: float = 180.0) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.2)


@contextmanager
def process(name: str, *command: str, folder: Path, **environment: str) -> Iterator[int]:
    with (folder / f"{name}.log").open("w") as log:
        variables = {**os.environ, **{f"RYZANSTEIN_{key}": value for key, value in environment.items()}}
        started = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=variables)
        try:
            yield started.pid
        finally:
            started.terminate()
            try:
                started.wait(5)
            except subprocess.TimeoutExpired:  # Jaeger takes up to half a minute, and what it flushes is not read
                started.kill()
                started.wait()


@contextmanager
def _jaeger(folder: Path, otlp: int, query: int) -> Iterator[None]:
    """With the configuration of the chart, on other ports."""
    text = (CHART / "files" / "jaeger.yaml").read_text()
    health = free_port()
    for old, new in ((4317, otlp), (16686, query), (13133, health), (16685, free_port())):
        text = text.replace(f":{old}", f":{new}").replace("0.0.0.0", "127.0.0.1")
    (folder / "jaeger.yaml").write_text(text)
    jaeger = program("jaeger")
    with process("jaeger", jaeger, "--config", str(folder / "jaeger.yaml"), folder=folder):
        wait("Jaeger", lambda: answers(f"http://127.0.0.1:{health}/status"))
        yield


@contextmanager
def _prometheus(folder: Path, port: int, targets: dict[str, int]) -> Iterator[None]:
    """With the rules of the chart, scraping and evaluating every second; what waits for minutes waits for seconds."""
    alerts = (CHART / "files" / "rules" / "alerts.yaml").read_text()
    (folder / "alerts.yaml").write_text(alerts.replace("for: 2m", "for: 2s"))
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"},
        "rule_files": [str(CHART / "files" / "rules" / "recording.yaml"), str(folder / "alerts.yaml")],
        "scrape_configs": [
            {
                "job_name": "ryzanstein",
                "static_configs": [
                    {"targets": [f"127.0.0.1:{metrics}"], "labels": {"component": component}}
                    for component, metrics in targets.items()
                ],
            }
        ],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    listen = f"127.0.0.1:{port}"
    args = (
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/tsdb",
        f"--web.listen-address={listen}",
    )
    prometheus = program("prometheus")
    with process("prometheus", prometheus, *args, folder=folder):
        wait("Prometheus", lambda: answers(f"http://{listen}/-/ready"))
        yield


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("monitoring")
    metrics = {component: free_port() for component in COMPONENTS}
    ports = {name: free_port() for name in ("gateway", "otlp", "jaeger", "prometheus")}
    redis = KillableRedis(folder)
    with ExitStack() as stack:
        stack.enter_context(_jaeger(folder, ports["otlp"], ports["jaeger"]))
        environment = stack.enter_context(pytest.MonkeyPatch.context())
        environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{ports['otlp']}")
        environment.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        redis.start()
        stack.callback(redis.kill)
        coordinator = stack.enter_context(
            running(coordinator_process(redis.url_of("coordinator"), METRICS_PORT=str(metrics["coordinator"])))
        )
        router = stack.enter_context(
            running(
                router_process(
                    redis.url_of("router"), COORDINATOR_ADDRESS=coordinator.address, METRICS_PORT=str(metrics["router"])
                )
            )
        )
        worker = {
            "MODEL": MODEL,
            "WORKER_ID": "w0",
            "WORKER_PORT": str(free_port()),
            "METRICS_PORT": str(metrics["worker"]),
            "DRAIN_S": "0",
            "HOST_CACHE_GIB": "0.01",
        }
        gateway = {
            "ROUTER_ADDRESSES": router.address,
            "GATEWAY_PORT": str(ports["gateway"]),
            "METRICS_PORT": str(metrics["gateway"]),
            "PRICES": '{"*": {"input": 1, "output": 2}}',
        }
        pids = {
            module: stack.enter_context(
                process(
                    module, sys.executable, "-m", f"services.{module}", folder=folder, REDIS_URL=redis.url, **settings
                )
            )
            for module, settings in (("worker", worker), ("gateway", gateway))
        }
        stack.enter_context(_prometheus(folder, ports["prometheus"], metrics))
        url = f"http://127.0.0.1:{ports['gateway']}"
        try:
            wait("the installation", lambda: answers(f"{url}/health"))
        except AssertionError as late:
            logs = (f"{module}: {(folder / f'{module}.log').read_text()[-4_000:]}" for module in pids)
            raise AssertionError("\n".join([*late.args, *logs, *map(str, router.logs()[-20:])])) from late
        yield Watched(
            url,
            f"http://127.0.0.1:{ports['prometheus']}",
            f"http://127.0.0.1:{ports['jaeger']}",
            redis,
            pids["worker"],
        )


def ask(watched: Watched, session: str = "", **headers: str) -> httpx.Response:
    body = {"prompt": "def fibonacci(n):\n    " * 8, "max_tokens": 12, **({"user": session} if session else {})}
    answer = httpx.post(f"{watched.gateway}/v1/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == httpx.codes.OK, answer.text
    return answer


def test_every_panel_shows_data_and_every_rule_is_evaluated(watched: Watched) -> None:
    def unevaluated() -> list[str]:
        groups = httpx.get(f"{watched.prometheus}/api/v1/rules", timeout=60).json()["data"]["groups"]
        evaluated = [rule for group in groups for rule in group["rules"]]
        assert len(evaluated) == len(rules())
        return [rule["name"] for rule in evaluated if rule["health"] != "ok"]

    def empty() -> set[str]:
        ask(watched, session="s")  # rates are over a window of a few scrapes
        ask(watched, session=uuid4().hex)  # a router asks Redis about sessions that are new to it
        return {title for title, panel in panels(OF_OTHERS) if not shows(panel, watched.query)} - EMPTY

    deadline = time.monotonic() + 6
    while time.monotonic() < deadline:
        ask(watched, session="s")
        time.sleep(0.3)
    wait("recorded series", lambda: watched.query("ryzanstein:affinity:ratio_rate10m"))
    wait("rules that are evaluated", lambda: not unevaluated())
    wait("panels that show something", lambda: not empty())


def test_a_trace_is_found_by_the_id_of_the_request_and_says_where_time_went(watched: Watched, tmp_path: Path) -> None:
    request_id = f"slow-{os.getpid()}"
    ask(watched, **{"x-request-id": request_id, "traceparent": f"00-{os.urandom(16).hex()}-{os.urandom(8).hex()}-01"})

    def trace(*options: str) -> subprocess.CompletedProcess[str]:
        return ryzanstein("trace", request_id, "--jaeger", watched.jaeger, *options, runtime_dir=tmp_path)

    def spans() -> list[dict[str, Any]]:
        actual = trace("--json")
        return json.loads(actual.stdout) if actual.returncode == 0 else []

    wait(
        "all spans", lambda: {span["service"] for span in spans()} >= {"gateway", "router", "kv-coordinator", "worker"}
    )
    by_name = {span["name"]: span for span in spans()}
    assert by_name["worker.request"]["duration"] <= by_name["POST /v1/completions"]["duration"]
    assert sum(span["own"] for span in by_name.values()) > 0
    text = trace().stdout
    assert "worker.request" in text
    assert " ms in " in text
    missing_one = ryzanstein("trace", "nobody-sent-this", "--jaeger", watched.jaeger, runtime_dir=tmp_path)
    assert missing_one.returncode == 1
    assert "no trace of nobody-sent-this" in missing_one.stderr


def test_a_planted_fault_is_found_by_the_trace(watched: Watched, tmp_path: Path) -> None:
    """The worker stands still for a moment: the gateway asks for a place again and again, the work itself is quick."""
    trace_id = os.urandom(16).hex()
    headers = {"traceparent": f"00-{trace_id}-{os.urandom(8).hex()}-01"}
    with ThreadPoolExecutor(1) as pool:
        os.kill(watched.worker, signal.SIGSTOP)
        try:
            slow = pool.submit(ask, watched, **headers)
            wait(
                "the request at the gateway",
                lambda: IN_FLIGHT in httpx.get(f"{watched.gateway}/metrics", timeout=60).text,
            )
            time.sleep(0.8)
        finally:
            os.kill(watched.worker, signal.SIGCONT)
        slow.result()

    def spans() -> list[dict[str, Any]]:
        actual = ryzanstein("trace", trace_id, "--jaeger", watched.jaeger, "--json", runtime_dir=tmp_path)
        return json.loads(actual.stdout) if actual.returncode == 0 else []

    wait("the worker's spans", lambda: any(span["service"] == "worker" for span in spans()))
    (work,) = [span for span in spans() if span["name"] == "worker.request"]
    assert work["start"] > 500
    longest = max(spans(), key=lambda span: span["own"])
    assert longest["service"] == "gateway", "it waited"


def test_an_alert_fires_on_a_planted_fault_and_resolves(watched: Watched) -> None:
    def firing() -> bool:
        ask(watched, session="s")  # routers learn of it by what they want of Redis; clients see nothing
        return bool(watched.query('ALERTS{alertname="RyzansteinRedisAway",alertstate="firing"}'))

    assert not firing()
    watched.redis.kill()
    wait("the alert", firing)
    watched.redis.start()
    wait("its end", lambda: not firing())
