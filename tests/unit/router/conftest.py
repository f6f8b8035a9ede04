from __future__ import annotations

import pytest

from tests.unit.router.fleets import Lab


@pytest.fixture
def lab() -> Lab:
    lab = Lab()
    for worker_id in ("a", "b", "c", "d"):
        lab.join(worker_id)
    return lab
