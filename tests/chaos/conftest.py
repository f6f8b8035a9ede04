"""One installation for all faults, whose workers hand off when they end, and what its streams are without a fault."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.streams import ClientStream, assert_undisturbed, run_streams
from tests.stack import RunningStack, running_stack

KILLER = [7, 11, 13, 17, 19, 23]  # the prompt that kills ranks
CASES, TOKENS = 64, 250
PLANTED = Path(__file__).parent / "planted"


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RYZANSTEIN_DRAIN_S", "0.05")  # shorter than an answer: a worker that ends has to hand off
        environment.setenv("RYZANSTEIN_TEST_KILLER", ",".join(map(str, KILLER)))
        environment.setenv("PYTHONPATH", os.pathsep.join([str(PLANTED), *filter(None, [os.getenv("PYTHONPATH")])]))
        with running_stack(tmp_path_factory.mktemp("run"), "--workers", "3", "--tensor-parallel", "1") as running:
            yield running


@pytest.fixture(scope="package")
def reference(stack: RunningStack) -> list[ClientStream]:
    """Every case's stream, undisturbed."""
    streams = asyncio.run(run_streams(stack, CASES, TOKENS))
    assert_undisturbed(streams, streams)
    return streams
