"""A device whose tokens come late, and a server that plans and cancels whenever it likes to."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from services.worker.backends.transfers import Ints, Numbers
from services.worker.protocol.plan import StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.protocol.result_codec import decode_result
from services.worker.protocol.words import read_words
from services.worker.rank.link import Received
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler

_WAITING = ("tolist", "item", "numpy", "cpu", "nonzero", "unique", "masked_select", "__bool__", "__int__", "__index__")


@dataclass
class Late:
    """Numbers that nobody may look at before they are waited for."""

    device: SlowDevice
    numbers: Tensor

    def arrived(self) -> bool:
        return self.device.rng.random() < 0.3

    def values(self) -> Ints:
        self.device.n_unread -= 1
        return self.numbers.numpy()


@dataclass
class SlowDevice:
    """A device whose tokens take their time."""

    rng: random.Random
    n_unread: int = 0
    n_overlaps: int = 0

    def up(self, arrays: Sequence[Numbers]) -> list[Tensor]:
        return [torch.from_numpy(array.copy()) for array in arrays]

    def down(self, numbers: Tensor) -> Late:
        self.n_overlaps += self.n_unread
        self.n_unread += 1
        return Late(self, numbers.clone())


@dataclass
class Server:
    """Plans whenever it likes to, and cancels."""

    scheduler: Scheduler
    rng: random.Random
    requests: list[Request]
    cancelled: set[int] = field(default_factory=set)
    plans: list[StepPlan] = field(default_factory=list)

    def waits(self, timeout_s: float) -> bool:
        if not self.plans and self.rng.random() < 0.5:
            self._plan()
        return bool(self.plans)

    def receive(self) -> Received:
        if not self.plans:
            self._plan()
        if self.plans:
            return Received(view_plan(self.plans.pop()), 0)
        assert self.scheduler.idle, "all results were sent, but there is nothing to plan"
        return Received(None, 0)

    def send(self, message: bytes | memoryview) -> None:
        self.scheduler.apply(decode_result(read_words(bytearray(message))))
        if self.rng.random() < 0.05:
            index = self.rng.randrange(len(self.requests))
            if self.scheduler.cancel(self.requests[index]):
                self.cancelled.add(index)

    def _plan(self) -> None:
        plan = self.scheduler.plan()
        if plan is not None:
            self.plans.append(plan)


class _Unasked(TorchFunctionMode):
    """Raises for what would wait for a device."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert getattr(func, "__name__", "") not in _WAITING, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@contextmanager
def unasked() -> Iterator[None]:
    """Let an operation that reads a number of the device fail."""
    with _Unasked():
        yield
