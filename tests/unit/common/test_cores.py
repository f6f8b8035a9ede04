"""A pod's CPU limit counts, not the node's cores: ranks that spin beyond it would be throttled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.common.cores import usable_cores
from services.compute.ranks.futex import Patience
from tests.unit.common.containers import container, container_v1


@pytest.fixture(autouse=True)
def _many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))


@pytest.mark.parametrize(("quota", "cores"), [("200000", 2), ("max", 64), ("50000", 1), ("150000", 1)])
def test_the_quota_limits_the_cores_in_either_hierarchy(tmp_path: Path, quota: str, cores: int) -> None:
    assert usable_cores(tmp_path) == 64
    container(tmp_path, {"cpu.max": f"{quota} 100000"})
    assert usable_cores(tmp_path) == cores
    container_v1(tmp_path, {"cpu.cfs_quota_us": quota.replace("max", "-1"), "cpu.cfs_period_us": "100000"})
    (tmp_path / "sys/fs/cgroup/cpu.max").unlink()
    assert usable_cores(tmp_path) == cores


def test_spinning_is_polite_when_the_cores_are_taken() -> None:
    assert Patience.choose(processes=3, cores=2, spin_s=0.001).polite
    assert not Patience.choose(processes=3, cores=4, spin_s=0.001).polite
