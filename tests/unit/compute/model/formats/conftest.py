from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.formats.checkpoints import Written, write


@pytest.fixture
def written(sample: Callable[[str], Sample], tmp_path: Path) -> Written:
    """`write` of a variant by its name, in the test's folder."""
    return lambda variant, *args, **options: write(sample(variant), tmp_path, *args, **options)
