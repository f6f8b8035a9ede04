from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.kv_coordinator.hot import HotPrefixes, PinLimitError, Pins


@given(st.lists(st.integers(0, 60), max_size=1500))
def test_counts_are_never_too_high_and_too_low_by_a_bounded_amount(blocks: list[int]) -> None:
    hot, capacity, exact = HotPrefixes(4), 4, Counter(blocks)
    for block in blocks:
        hot.count([block])
    counted = {prefix.block: prefix.lookups for prefix in hot.top(1000)}
    assert len(counted) <= 2 * capacity
    for block, count in exact.items():
        assert counted.get(block, 0) <= count
        if count > len(blocks) / capacity + 1:
            assert counted[block] >= count - len(blocks) / capacity


def test_a_hot_prefix_survives_many_cold_prefixes_in_bounded_memory() -> None:
    hot, capacity = HotPrefixes(4), 4
    for block in range(1, 1001):
        for each in (block, block, 0, 0):
            hot.count([each])
    first, *others = hot.top(10_000)
    assert (first.block, len(others) < 2 * capacity) == (0, True)
    assert 2000 - 4000 / capacity <= first.lookups <= 2000


def test_a_shared_prefix_is_hotter_than_its_continuations() -> None:
    hot = HotPrefixes(100)
    for i in range(50):
        hot.count([1, 2, 3, 4, 1000 + i, 2000 + i])
    assert [(p.block, p.lookups) for p in hot.top(5)] == [(1, 50), (2, 50), (4, 50)]


def test_pins_expire_and_are_limited() -> None:
    pins = Pins(limit=2)
    pins.pin(1, expires_at=10.0, now=0.0)
    pins.pin(2, expires_at=20.0, now=0.0)
    with pytest.raises(PinLimitError):
        pins.pin(3, expires_at=20.0, now=5.0)
    pins.pin(1, expires_at=12.0, now=5.0)
    assert pins.active(11.0) == [1, 2]
    pins.pin(3, expires_at=30.0, now=12.0)
    assert pins.active(12.0) == [2, 3]
