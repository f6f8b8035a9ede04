"""Collections skip objects that live as long as the process, and free others."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterator

import pytest

from services.common.heap import YOUNG_ALLOCATIONS, FleetHeap, freeze_started, uncollected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class CycleNode:
    """A cycle of one."""

    def __init__(self) -> None:
        self.me = self


def test_garbage_collection_is_off_during_imports() -> None:
    with contextlib.suppress(ImportError), uncollected():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_a_started_process_is_out_of_sight() -> None:
    freeze_started()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[0] == YOUNG_ALLOCATIONS
    assert len(gc.get_objects()) < gc.get_freeze_count()


def test_a_fleet_is_frozen_once_membership_is_stable() -> None:
    heap = FleetHeap()
    assert not heap.freeze_if_still(10, 0)  # they are still coming
    assert not heap.freeze_if_still(20, 0)
    assert heap.freeze_if_still(20, 0)
    assert not heap.freeze_if_still(20, 0)
    assert not heap.freeze_if_still(21, 0)
    assert heap.freeze_if_still(21, 0)


def test_garbage_of_departed_members_is_collected_above_a_threshold() -> None:
    heap, node = FleetHeap(), CycleNode()
    heap.freeze_if_still(100, 0)
    assert heap.freeze_if_still(100, 0)
    member = weakref.ref(node)
    del node
    heap.freeze_if_still(100, 5)
    assert heap.freeze_if_still(100, 5)
    assert member() is not None  # a few are not worth a pause
    heap.freeze_if_still(100, 20)
    assert heap.freeze_if_still(100, 20)
    assert member() is None
