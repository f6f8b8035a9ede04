"""These tests belong to `make test-vllm`; elsewhere there is no vLLM."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import RunningStack
from tests.vllm.installation import PYTHON, vllm_installation

collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    with vllm_installation(tmp_path_factory.mktemp("vllm")) as running:
        yield running
