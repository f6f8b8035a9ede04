"""Services as processes that are forked with their modules imported: an interpreter of its own imports for a second."""

from __future__ import annotations

import multiprocessing
import os
import runpy
from collections.abc import Mapping
from pathlib import Path

_FORKING = multiprocessing.get_context("forkserver")
_FORKING.set_forkserver_preload([__name__, "services.router.main", "services.kv_coordinator.main"])


class ForkedService:
    """`python -m MODULE` but for its interpreter's start, with the methods of `subprocess.Popen` that tests call."""

    def __init__(self, module: str, environment: Mapping[str, str], log: Path) -> None:
        """`log` gets what the service prints."""
        self._process = _FORKING.Process(target=_serve, args=(module, dict(environment), str(log)), daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit status; None while the service runs."""
        return self._process.exitcode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        """The exit status; raises TimeoutError after `timeout` seconds."""
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"process {self.pid} runs after {timeout} s")
        return status


def _serve(module: str, environment: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    runpy.run_module(module, run_name="__main__")
