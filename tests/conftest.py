"""With `-n 2` what needs the machine for itself runs first, in one process; then the charts and units, in both."""

from __future__ import annotations

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

TOGETHER = ("tests/charts/", "tests/unit/")  # no stack of processes, no time that is measured
ALONE = "alone"

settings.register_profile("no-deadline", deadline=None)  # speed lives in bench/
settings.load_profile("no-deadline")


def _unit_of(nodeid: str) -> str:
    """What goes to a process as a whole: a file, whose tests share their fixtures, or all that runs alone."""
    return nodeid.split("::", 1)[0] if nodeid.startswith(TOGETHER) else ALONE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _unit_of(item.nodeid) != ALONE)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> AloneFirst:
    config.option.loadscopereorder = False  # the order is the collection's
    return AloneFirst(config, log)


class AloneFirst(LoadScopeScheduling):
    """The first process gets what runs alone; the others wait for its end, then all take one file after the other."""

    def _split_scope(self, nodeid: str) -> str:
        return _unit_of(nodeid)

    def _assign_work_unit(self, node: WorkerController) -> None:
        others = (units for other, units in self.assigned_work.items() if other is not node)
        if all(all(units.get(ALONE, {}).values()) for units in others):
            super()._assign_work_unit(node)

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        super().mark_test_complete(node, item_index, duration)
        if ALONE in self.assigned_work[node]:
            for other in self.nodes:
                self._reschedule(other)
