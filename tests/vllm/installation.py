"""An installation whose pool runs on vLLM, and its processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from services.common.ports import free_port
from tests.stack import RunningStack, running_stack

PYTHON = os.environ.get("RYZANSTEIN_TEST_VLLM", "")
START_S = 900  # start of vLLM on a busy machine


@contextmanager
def vllm_installation(folder: Path) -> Iterator[RunningStack]:
    """Two workers on vLLM, which serve the tiny model as `tiny`."""
    engine = (
        "--engine=vllm",
        f"--engine-python={PYTHON}",
        "--engine-arg=enforce_eager=true",
        "--engine-arg=block_size=32",
    )
    sizes = ("--workers=2", "--dtype=float32", "--max-model-len=512", "--kv-tokens=16384", f"--start-timeout={START_S}")
    with running_stack(folder, *engine, *sizes, "--served-model-name=tiny", start_s=START_S) as running:
        yield running


def engine_pid(stack: RunningStack, worker: str) -> int:
    """The process of vLLM that schedules: the parent of its ranks."""
    children = psutil.Process(stack.pid_of(worker)).children(recursive=True)
    return next(child.pid for child in children if any("EngineCore" in word for word in child.cmdline()))


def start_worker(
    stack: RunningStack, name: str, python: Sequence[str], settings: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """One more worker than those of the installation; `settings` by their names without RYZANSTEIN_."""
    places = {
        "REDIS_URL": f"unix://{stack.folder / 'redis.sock'}",
        "NAMESPACE": f"up-{stack.port}",
        "HOST": "127.0.0.1",
        "WORKER_ID": name,
        "WORKER_PORT": str(free_port()),
        "MAX_MODEL_LEN": "512",
    }
    given = {f"RYZANSTEIN_{key}": value for key, value in (places | dict(settings)).items()}
    with (stack.folder / "logs" / f"{name}.log").open("w") as log:
        command = [*python, "-m", "services.worker"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **given}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
