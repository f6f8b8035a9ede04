"""Executes the server's messages in order.

A step whose tokens stay on the device is only awaited: the following one is launched before its tokens are read, so
the device has work while the host reads, sends and plans. Messages other than plans wait for the step before them.
"""

from __future__ import annotations

from services.compute.model.spec import ModelError
from services.worker.protocol.order_codec import (
    AdapterOrder,
    CopyOrder,
    Order,
    SleepOrder,
    StateOrder,
    WakeOrder,
    encode_answer,
)
from services.worker.protocol.plan import StepResult
from services.worker.protocol.plan_codec import PlanView
from services.worker.protocol.result_codec import encode_result
from services.worker.rank.awake import Sleeper
from services.worker.rank.link import ServerLink
from services.worker.rank.runner import Launched
from services.worker.rank.worst_step import naming_what_to_lower

_LOOK_S = 20e-6  # between two looks at the device while no plan is there


class StepLoop:
    """One rank's work from its start to the stop message."""

    def __init__(self, link: ServerLink, sleeper: Sleeper) -> None:
        self._link, self._sleeper = link, sleeper
        self._awaited: Launched | None = None

    def run(self) -> None:
        """Return after the stop message."""
        while True:
            self._await_message()
            received = self._link.receive()
            if isinstance(received.plan, PlanView):
                self._step(received.plan, received.wait_us)
                continue
            self._finish_awaited()
            if received.plan is None:
                return
            self._link.send(encode_answer(received.number, self._execute(received.plan)))

    def _await_message(self) -> None:
        """Return once there is a message, or once no step is awaited: its tokens may come before the next plan.

        A KV cache that has yet to take memory takes some whenever that is due, also while messages wait.
        """
        while self._awaited is not None and not self._link.waits(_LOOK_S):
            if self._awaited.arrived():
                self._finish_awaited()
        while (rest_s := self._sleeper.rest_s) is not None:
            if rest_s and self._link.sleeps(rest_s):
                return
            self._sleeper.take()

    def _step(self, plan: PlanView, wait_us: int) -> None:
        with naming_what_to_lower("a step", "RYZANSTEIN_GPU_MEMORY_UTILIZATION"):
            launched = self._sleeper.awake.runner.launch(plan, wait_us)
            self._finish_awaited()
            if launched.awaited:
                self._awaited = launched
            else:
                self._send(self._sleeper.awake.runner.finish(launched))

    def _finish_awaited(self) -> None:
        awaited, self._awaited = self._awaited, None
        if awaited is not None:
            self._send(self._sleeper.awake.runner.finish(awaited))

    def _send(self, result: StepResult | None) -> None:
        if result is not None:
            self._link.send(encode_result(result))

    def _execute(self, order: Order) -> str:
        """Execute an order between two steps; returns why that failed, or an empty text."""
        match order:
            case SleepOrder(level):
                self._sleeper.sleep(level)
            case WakeOrder():
                self._sleeper.wake()  # without a model the rank cannot go on, so that errors end it
            case CopyOrder():
                self._sleeper.awake.copier.copy(order)
            case StateOrder():
                self._sleeper.awake.states.copy(order)
            case AdapterOrder():
                try:
                    self._sleeper.awake.model.load_adapter(order)
                except ModelError as error:
                    return str(error)
        return ""
