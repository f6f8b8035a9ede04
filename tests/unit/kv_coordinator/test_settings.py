"""Coordinators that divide the workers."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from services.kv_coordinator.settings import CoordinatorSettings


def test_each_worker_has_one_coordinator_and_all_coordinators_have_workers() -> None:
    shards = [CoordinatorSettings(coordinator_shard=f"rz-coordinator-{n}", coordinator_shards=4) for n in range(4)]
    counted: Counter[int] = Counter()
    for number in range(1000):
        (own,) = [shard.coordinator_shard for shard in shards if shard.follows(f"rz-workers-default-{number}")]
        counted[own] += 1
    assert all(150 < count < 350 for count in counted.values()), counted
    assert len(counted) == len(shards)
    assert CoordinatorSettings().follows("any")


def test_coordinator_without_a_number_below_their_number_is_refused() -> None:
    with pytest.raises(ValidationError, match="COORDINATOR_SHARD: must be below RYZANSTEIN_COORDINATOR_SHARDS"):
        CoordinatorSettings(coordinator_shard=2, coordinator_shards=2)
    with pytest.raises(ValidationError, match="a name that ends with one"):
        CoordinatorSettings(coordinator_shard="first", coordinator_shards=2)  # type: ignore[arg-type]
