"""A real local installation for tests: `ryzanstein up` as a user would start it, with the tiny model by default."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from ryzanstein.v1 import routing_pb2, routing_pb2_grpc

from services.cli.stack.default_model import TINY_MODEL
from services.common.ports import free_port
from tests.shell import captured

COMMAND = str(Path(sys.executable).parent / "ryzanstein")
START_S = 180


@dataclass(frozen=True)
class RunningStack:
    """A started installation."""

    process: subprocess.Popen[str]
    port: int
    runtime_dir: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        return self.runtime_dir / "ryzanstein" / str(self.port)

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads((self.folder / "stack.json").read_text())
        return state

    def pid_of(self, name: str) -> int:
        return int(self.state["processes"][name])

    def ready(self) -> bool:
        """Whether the gateway answers, and says that it can serve."""
        try:
            return httpx.get(f"{self.url}/health", timeout=1).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def ryzanstein(self, *args: str) -> subprocess.CompletedProcess[str]:
        return ryzanstein(*args, runtime_dir=self.runtime_dir)

    def model(self) -> str:
        return str(httpx.get(f"{self.url}/v1/models", timeout=60).json()["data"][0]["id"])

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-3000:]}" for p in sorted((self.folder / "logs").glob("*.log")))

    def rank_pids(self, worker: str = "worker-0") -> list[int]:
        """The tensor-parallel ranks of a worker, in no particular order."""
        children = psutil.Process(self.pid_of(worker)).children(recursive=True)
        leaves = [child for child in children if not child.children()]
        return [leaf.pid for leaf in leaves if "services.worker.rank" in leaf.cmdline()]

    def workers(self) -> list[routing_pb2.WorkerView]:
        """The workers as the router sees them; none while it does not answer."""
        with grpc.insecure_channel(self.state["router"]) as channel:
            try:
                listed = routing_pb2_grpc.RouterStub(channel).ListWorkers(routing_pb2.ListWorkersRequest(), timeout=30)
            except grpc.RpcError:
                return []
        return list(listed.workers)

    def busiest(self) -> str:
        """The worker that computes most requests, by the router's word; of a dead one, that is old."""
        serving = [view for view in self.workers() if view.eligible]
        return max(serving, key=lambda view: view.state.running).worker_id

    def wait_serving(self, workers: int, timeout_s: float = 180) -> None:
        """Return once the router gives work to this many workers."""
        deadline = time.monotonic() + timeout_s
        while sum(view.eligible for view in self.workers()) < workers:
            if time.monotonic() > deadline:
                raise AssertionError(f"{workers} workers not serving after {timeout_s} s\n{self.logs()}")
            time.sleep(0.1)

    def wait_busy(self, workers: int, requests: int = 1, timeout_s: float = 180) -> None:
        """Return once this many workers compute at least `requests` each."""
        deadline = time.monotonic() + timeout_s
        while sum(view.state.running >= requests for view in self.workers()) < workers:
            if time.monotonic() > deadline:
                raise AssertionError(f"{workers} workers not busy after {timeout_s} s\n{self.logs()}")
            time.sleep(0.01)

    def wait_replaced(self, name: str, pid: int, timeout_s: float = 180) -> None:
        """Return once `name` is another process than `pid`."""
        deadline = time.monotonic() + timeout_s
        while self.pid_of(name) == pid:
            if time.monotonic() > deadline:
                raise AssertionError(f"{name} is still process {pid} after {timeout_s} s\n{self.logs()}")
            time.sleep(0.1)

    def resumes(self) -> Counter[str]:
        """How many attempts the gateway has seen interrupted, by cause."""
        samples = self._samples("ryzanstein_gateway_resumes_total")
        return Counter({sample.labels["cause"]: int(sample.value) for sample in samples if sample.value})

    def late_resumes(self, limit_s: float) -> int:
        """How many streams waited for longer than `limit_s`, a bucket's bound, to go on elsewhere."""
        name = "ryzanstein_gateway_resume_seconds_bucket"
        within = {float(sample.labels["le"]): int(sample.value) for sample in self._samples(name)}
        return within[float("inf")] - within[limit_s]

    def first_tokens(self) -> int:
        """How many answers have begun."""
        return sum(
            int(sample.value) for sample in self._samples("ryzanstein_gateway_time_to_first_token_seconds_count")
        )

    def wait_first_token(self, begun: int, timeout_s: float = 180) -> None:
        """Return once more than `begun` answers have."""
        deadline = time.monotonic() + timeout_s
        while self.first_tokens() <= begun:
            if time.monotonic() > deadline:
                raise AssertionError(f"no answer began within {timeout_s} s\n{self.logs()}")
            time.sleep(0.01)

    def _samples(self, name: str) -> list[Sample]:
        """Of the gateway's metrics."""
        metrics = text_string_to_metric_families(httpx.get(f"{self.url}/metrics", timeout=60).text)
        return [sample for metric in metrics for sample in metric.samples if sample.name == name]

    def complete(self, **body: Any) -> httpx.Response:
        """POST /v1/completions for the served model."""
        return httpx.post(f"{self.url}/v1/completions", json={"model": self.model(), **body}, timeout=120)

    def stop(self, signum: int = signal.SIGINT) -> str:
        self.process.send_signal(signum)
        output, _ = self.process.communicate(timeout=120)
        return output


def environment(runtime_dir: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(runtime_dir), "COLUMNS": "200"}


def ryzanstein(*args: str, runtime_dir: Path, timeout_s: float = START_S) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return captured([COMMAND, *args], env=environment(runtime_dir), timeout=timeout_s)


@contextlib.contextmanager
def running_stack(
    runtime_dir: Path, *args: str, model: str = str(TINY_MODEL), start_s: float = START_S, command: str = "up"
) -> Iterator[RunningStack]:
    """`ryzanstein up`, or another command that starts an installation, on a free port, ready.

    It is stopped with Ctrl-C at the end. Without `model` it serves its default.
    """
    port = free_port()
    named = ["--model", model] if model else []
    process = subprocess.Popen(
        [COMMAND, command, "--port", str(port), *named, *args],
        env=environment(runtime_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    stack = RunningStack(process, port, runtime_dir)
    try:
        _wait_ready(stack, start_s)
        yield stack
    finally:
        if process.poll() is None:
            stack.stop()


def _wait_ready(stack: RunningStack, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        if stack.process.poll() is not None:
            raise AssertionError(f"ryzanstein ended: {stack.process.stdout.read() if stack.process.stdout else ''}")
        # A process that a test kills before the installation is supervised would end the whole start.
        if stack.ready() and stack.state["supervised"]:
            return
        time.sleep(0.1)
    raise AssertionError(f"not ready in {start_s} s\n{stack.logs()}")
