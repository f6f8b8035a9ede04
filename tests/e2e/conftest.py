from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import RunningStack, running_stack

PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """On a busy machine a service that waits for its turn is not taken for one that is away."""
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {"REDIS_TIMEOUT_S": "5", "REDIS_TIMEOUT_MS": "5000", "LOOKUP_TIMEOUT_MS": "5000"}.items():
            environment.setenv(f"RYZANSTEIN_{name}", value)
        yield


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A whole installation of the tiny model, shared by all tests that do not break it."""
    with running_stack(tmp_path_factory.mktemp("run")) as running:
        yield running


@pytest.fixture(scope="session")
def float32_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """The same in the number format that is compared with `transformers`."""
    with running_stack(tmp_path_factory.mktemp("run"), "--dtype", "float32") as running:
        yield running
