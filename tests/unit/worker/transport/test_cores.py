"""A pod's CPU limit counts, not the node's cores: ranks that spin beyond it would be throttled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.worker.transport.cores import usable_cores
from services.worker.transport.futex import Patience


@pytest.mark.parametrize(("quota", "cores"), [("200000 100000", 2), ("max 100000", 64), ("50000 100000", 1)])
def test_the_quota_limits_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)))
    assert usable_cores(tmp_path) == 64
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    assert usable_cores(tmp_path) == cores


def test_spinning_is_polite_when_the_cores_are_taken() -> None:
    assert Patience.choose(processes=3, cores=2, spin_s=0.001).polite
    assert not Patience.choose(processes=3, cores=4, spin_s=0.001).polite
