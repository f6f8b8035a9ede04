"""An API server for the commands below `ryzanstein kube`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube_api import KubeApi, running_kube_api


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubeApi]:
    with running_kube_api(KubeApi(), tmp_path, monkeypatch) as api:
        yield api
