"""A device whose tokens come late, and a server that plans and cancels whenever it likes to."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import torch
from torch import Tensor

from services.compute.backends.transfers import Ints, Numbers
from services.worker.engine.kv_events import KvEventLog
from services.worker.protocol.plan import StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.protocol.result_codec import decode_result
from services.worker.protocol.words import read_words
from services.worker.rank.awake import Awake, Sleeper
from services.worker.rank.block_copy import BlockCopier
from services.worker.rank.forward import Model
from services.worker.rank.link import Received
from services.worker.rank.loop import StepLoop
from services.worker.rank.runner import Runner
from services.worker.rank.state_copy import StateCopier
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from services.worker.scheduling.speculation import DraftCost
from tests.unit.compute.backends.tape import CPU, Direct
from tests.unit.compute.model.harness import lone_rank
from tests.unit.worker.scheduling.harness import Guesses

BLOCK, N_BLOCKS, SLOTS, LENGTH = 16, 11, 5, 96  # too few blocks for all slots: requests are preempted
SNAPSHOTS = 3
STATE_ROWS = SLOTS + SNAPSHOTS + 1  # a recorded graph writes to the last one for rows without a state


@dataclass
class LateNumbers:
    """Numbers that may not be read before they are waited for."""

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
    n_up: int = 0
    n_down: int = 0

    def up(self, arrays: Sequence[Numbers]) -> list[Tensor]:
        self.n_up += 1
        return [torch.from_numpy(array.copy()) for array in arrays]

    def up_to(self, arrays: Sequence[Numbers], place: Tensor) -> None:
        self.n_up += 1
        Direct().up_to(arrays, place)

    def down(self, numbers: Tensor) -> LateNumbers:
        self.n_down += 1
        self.n_overlaps += self.n_unread
        self.n_unread += 1
        return LateNumbers(self, numbers.clone())


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


def make_runner(decoder: Model[Any], cache: Any, device: SlowDevice, *, overlaps: bool) -> Runner[Any]:
    return Runner(
        decoder,
        cache,
        lone_rank(),
        n_blocks=N_BLOCKS,
        block_tokens=BLOCK,
        max_running=SLOTS,
        max_model_len=LENGTH,
        device=CPU,
        transfers=device,
        overlaps=overlaps,
        states=cache.states,
    )


def serve(
    requests: list[Request],
    runner: Runner[Any],
    cache: Any,
    device: SlowDevice,
    seed: int,
    guesses: Sequence[Sequence[int]] = (),
) -> set[int]:
    """Serve all requests; returns which of them were cancelled. `guesses`: texts that drafts are taken from."""
    has_state = cache.states is not None
    config = SchedulerConfig(
        N_BLOCKS,
        BLOCK,
        LENGTH,
        SLOTS,
        max_batched_tokens=24,
        speculation=bool(guesses),
        has_state=has_state,
        snapshots=SNAPSHOTS if has_state else 0,
    )
    scheduler = Scheduler(config, KvEventLog())
    scheduler.speculator.cost = DraftCost(1.0, 0.01)
    for request in requests:
        scheduler.submit(request)
    for request, text in zip(requests, guesses, strict=False):
        if request.drafts is not None:
            request.drafts.drafters = [Guesses(text[request.n_prompt :], request.n_prompt, random.Random(seed))]
    server = Server(scheduler, random.Random(seed), requests)
    staging = memoryview(bytearray(1 << 16))
    awake = Awake(Mock(), runner, BlockCopier(cache.layers, staging), StateCopier(None, staging))
    StepLoop(server, Sleeper(awake, Mock(), Mock(), Mock())).run()
    assert not device.n_unread
    return server.cancelled


def assert_same(expected: list[Request], actual: list[Request], cut: set[int]) -> None:
    """All tokens are the same; those of the requests `cut`, which were cancelled, as far as there are any."""
    for number, (one, other) in enumerate(zip(expected, actual, strict=True)):
        scored = ([row.token_id for row in request.prompt_logprobs] for request in (one, other))
        for ours, theirs in ((one.token_ids, other.token_ids), scored):
            n = min(len(ours), len(theirs))
            assert ours[:n] == theirs[:n]
            assert number in cut or len(ours) == len(theirs)
