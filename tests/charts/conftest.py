"""Every test with a parameter `rendered` runs for each ci values file and each profile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.charts.rendering import ALL_VALUES, HELMS, Rendered, render
from tests.programs import program


@pytest.fixture(scope="session", autouse=True)
def helms() -> None:
    """Helm 3 and 4 are there; otherwise all of these tests are skipped, or fail where that must not be."""
    for major in HELMS:
        program(f"helm {major}")


@pytest.fixture(params=ALL_VALUES, ids=lambda path: path.stem)
def values(request: pytest.FixtureRequest) -> Path:
    chosen: Path = request.param
    return chosen


@pytest.fixture
def rendered(values: Path) -> Rendered:
    return render(values)
