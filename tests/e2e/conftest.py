from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.common.ports import free_port
from tests.otlp import Collector, collecting
from tests.stack import RunningStack, running_stack

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """On a busy machine a service that waits for its turn is not taken for one that is away."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"REDIS_TIMEOUT_S": "5", "REDIS_TIMEOUT_MS": "5000", "LOOKUP_TIMEOUT_MS": "5000"}.items():
            environment.setenv(f"RYZANSTEIN_{name}", value)
        yield


@pytest.fixture(scope="package")
def grpc_port() -> int:
    """Where `stack` also listens."""
    return free_port()


@pytest.fixture(scope="package")
def traces() -> Iterator[tuple[Collector, dict[str, str]]]:
    """The receiver of the spans of `stack`, and its variables."""
    with collecting() as collector_and_variables:
        yield collector_and_variables


@pytest.fixture(scope="package")
def stack(
    traces: tuple[Collector, dict[str, str]], grpc_port: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningStack]:
    """A whole installation of the tiny model, shared by all tests that do not break it."""
    with ExitStack() as running:
        with pytest.MonkeyPatch.context() as environment:  # environment of this installation alone
            for name, value in traces[1].items():
                environment.setenv(name, value)
            options = ("--grpc-port", str(grpc_port))
            stack = running.enter_context(running_stack(tmp_path_factory.mktemp("run"), *options))
        yield stack


@pytest.fixture(scope="package")
def float32_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The same in the number format that is compared with `transformers`."""
    with running_stack(tmp_path_factory.mktemp("run"), "--dtype", "float32") as running:
        yield running
