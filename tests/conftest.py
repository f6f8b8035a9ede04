"""How processes share the tests: faults run first and alone, then stacks of processes, then charts and units."""

from __future__ import annotations

import functools
import gc
import sys
from collections.abc import Generator

import pytest
from httpx._transports import default as httpx_transports
from httpx2._transports import default as httpx2_transports
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

pytest_plugins = ["tests.left_out"]

ALONE = "tests/chaos/"  # its faults end within times that a busy machine does not keep
SHARED = ("tests/e2e/", "tests/images/", "tests/charts/")  # folders whose files share a stack, or what Helm rendered
STACKS = "tests/integration/"  # long, and mostly waiting: units fill the other cores

# Speed lives in bench/, so that a slow machine is no failure. A commit is judged by the same examples each time;
# `--hypothesis-profile drawn` draws others, as nightly runs do.
settings.register_profile("drawn", deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", settings.get_profile("drawn"), derandomize=True, max_examples=20)
settings.load_profile("short")


# The clients of tests speak plain HTTP. Each would read the certificates of all authorities, which takes 30 ms or more.
for transports in (httpx_transports, httpx2_transports):
    transports.create_ssl_context = functools.cache(transports.create_ssl_context)


def _unit_of(nodeid: str) -> str:
    """The unit of work of a process: a file, or a folder whose files share a stack."""
    for folder in (ALONE, *SHARED):
        if nodeid.startswith(folder):
            return folder
    return nodeid.split("::", 1)[0]


def _turn(item: pytest.Item) -> int:
    for turn, folders in enumerate((ALONE, SHARED, STACKS)):
        if item.nodeid.startswith(folders):
            return turn
    return 3


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imported models are known afterwards."""
    gc.disable()  # for the millions of objects that imports make and that stay: no collection walks them
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(1)  # the processes share the cores; threads that wait for one another spin


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's random tensors are the same in every run, whatever ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=_turn)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> AloneFirst:
    config.option.loadscopereorder = False  # the order is the collection's
    return AloneFirst(config, log)


class AloneFirst(LoadScopeScheduling):
    """The first process gets what runs alone; the others wait for its end, then all take one unit after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return _unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = (units for other, units in self.assigned_work.items() if other is not node)
        if all(all(units.get(ALONE, {}).values()) for units in others):
            super()._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        if ALONE in self.assigned_work[node]:
            for other in self.registered_collections:  # without one that is only starting, in place of one that crashed
                self._reschedule(other)
