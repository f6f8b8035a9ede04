"""Worker servers as users start them: processes of their own, with torchrun ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from services.common.ports import free_port
from tests.models import BUNDLED_MODEL

PROJECT = BUNDLED_MODEL.parents[1]


@dataclass
class ServerProcess:
    process: subprocess.Popen[bytes]
    address: str
    log: Path

    def ranks(self) -> list[psutil.Process]:
        below = psutil.Process(self.process.pid).children(recursive=True)
        ranks = [p for p in below if "services.worker.rank" in p.cmdline()]
        return [p for p in ranks if not any(child.ppid() == p.pid for child in ranks)]


@contextmanager
def server_process(folder: Path, redis_url: str, **env: str) -> Iterator[ServerProcess]:
    port = free_port()
    log = folder / f"worker-{port}.log"
    variables = {
        "WORKER_ID": f"w{port}",
        "WORKER_PORT": str(port),
        "REDIS_URL": redis_url,
        "MODEL": str(BUNDLED_MODEL),
        "DTYPE": "float32",
        "KV_TOKENS": "8192",
        "MAX_RUNNING": "16",
        **env,
    }
    environment = os.environ | {f"RYZANSTEIN_{key}": value for key, value in variables.items()}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.worker"],
            cwd=PROJECT,
            env=environment | {"OMP_NUM_THREADS": "1"},
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
        try:
            yield ServerProcess(process, f"127.0.0.1:{port}", log)
        finally:
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()
                sys.stdout.write(log.read_text()[-6000:])
