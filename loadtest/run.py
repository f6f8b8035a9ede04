"""Starts an installation and runs simulated users against it; see loadtest/locustfile.py.

python -m loadtest.run --users 20 --run-time 1m
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from services.common.ports import free_port
from tests.stack import RunningStack, running_stack

FOLDER = Path(__file__).parent
_STOP_S = 30  # for answers in progress at the end


def locust(stack: RunningStack, grpc_port: int, users: int, run_time: str, think: float, report: Path) -> int:
    """Run the users to their end; return locust's exit status, which is not 0 if a request failed."""
    return subprocess.run(
        [
            *(sys.executable, "-m", "locust", "-f", str(FOLDER / "locustfile.py"), "--headless", "--only-summary"),
            *("--host", stack.url, "--grpc", f"127.0.0.1:{grpc_port}", "--think", str(think)),
            *("--users", str(users), "--spawn-rate", str(max(1, users // 10)), "--run-time", run_time),
            *("--stop-timeout", str(_STOP_S), "--html", str(report)),
        ],
        check=False,
    ).returncode


def main(
    users: Annotated[int, typer.Option(min=1)] = 20,
    run_time: Annotated[str, typer.Option(help="Like 30s or 5m.")] = "1m",
    workers: Annotated[int, typer.Option(min=1)] = 2,
    tensor_parallel: Annotated[int, typer.Option(min=1)] = 1,
    think: Annotated[float, typer.Option(help="Median think time of a user in seconds.")] = 3.0,
) -> None:
    """Start a stack, run the users, write the report; the exit status says whether a request failed."""
    report = FOLDER / "reports" / f"{time.strftime('%Y-%m-%dT%H-%M-%SZ', time.gmtime())}.html"
    grpc_port = free_port()
    args = [
        *("--workers", str(workers)),
        *("--tensor-parallel", str(tensor_parallel)),
        *("--grpc-port", str(grpc_port)),
    ]
    with (
        tempfile.TemporaryDirectory(prefix="rz-") as folder,
        running_stack(Path(folder), *args) as stack,
    ):
        status = locust(stack, grpc_port, users, run_time, think, report)
    typer.echo(f"Report: {report}")
    raise typer.Exit(status)


if __name__ == "__main__":
    typer.run(main)
