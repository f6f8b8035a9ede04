"""A step is launched before the tokens of the one before are read; the tokens are those of steps in turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from ryzanstein.v1.worker_pb2 import Sampling
from torch import Tensor

from services.worker.backends.collectives import SingleRank
from services.worker.backends.transfers import Ints
from services.worker.engine.kv_events import KvEventLog
from services.worker.protocol.plan import StepPlan
from services.worker.protocol.plan_codec import view_plan
from services.worker.protocol.result_codec import decode_result
from services.worker.protocol.words import read_words
from services.worker.rank.block_copy import BlockCopier
from services.worker.rank.link import Received
from services.worker.rank.loop import StepLoop
from services.worker.rank.process import refuse_adapter
from services.worker.rank.runner import Runner
from services.worker.scheduling.config import SchedulerConfig
from services.worker.scheduling.request import Request
from services.worker.scheduling.scheduler import Scheduler
from tests.integration.worker_ranks.standin import VOCAB, StandinCache, StandinDecoder, standin_cache
from tests.unit.worker.model.harness import lone_rank

CPU = torch.device("cpu")
BLOCK, N_BLOCKS, SLOTS, LENGTH = 16, 11, 5, 96  # too few blocks for all slots: requests are preempted


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

    def up(self, arrays: Sequence[Ints]) -> list[Tensor]:
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


def make_requests(seed: int) -> list[Request]:
    """Greedy and drawn, with short ends and long ones, and some that need the host."""
    rng = random.Random(seed)
    on_host = [
        Sampling(temperature=1.0, top_k=5),
        Sampling(repetition_penalty=1.3),
        Sampling(logprobs=2),
        Sampling(prompt_logprobs=1),
        Sampling(logit_bias={3: 5.0}, min_tokens=2),
    ]
    found = []
    for number in range(12):
        sampling = rng.choice(on_host) if rng.random() < 0.25 else Sampling(temperature=rng.choice([0.0, 1.0]))
        sampling.seed = number
        sampling.stop_token_ids.extend(rng.sample(range(VOCAB), 3))
        prompt = [rng.randrange(88) for _ in range(rng.randint(1, 40))]
        found.append(Request(prompt, len(prompt), sampling, max_tokens=rng.randint(1, 50)))
    return found


def serve(seed: int, *, overlaps: bool) -> tuple[list[Request], set[int], SlowDevice]:
    requests, device = make_requests(seed), SlowDevice(random.Random(seed))
    scheduler = Scheduler(SchedulerConfig(N_BLOCKS, BLOCK, LENGTH, SLOTS, max_batched_tokens=24), KvEventLog())
    cache = standin_cache(N_BLOCKS, BLOCK)
    runner: Runner[StandinCache] = Runner(
        StandinDecoder(SingleRank()),
        cache,
        lone_rank(),
        n_blocks=N_BLOCKS,
        block_tokens=BLOCK,
        max_running=SLOTS,
        max_model_len=LENGTH,
        device=CPU,
        transfers=device,
        overlaps=overlaps,
    )
    for request in requests:
        scheduler.submit(request)
    server = Server(scheduler, random.Random(seed + overlaps), requests)
    StepLoop(server, runner, BlockCopier(cache.layers, memoryview(bytearray(1 << 16))), refuse_adapter).run()
    assert not device.n_unread
    return requests, server.cancelled, device


@pytest.mark.parametrize("seed", range(4))
def test_tokens_are_those_of_steps_that_do_not_overlap(seed: int) -> None:
    """Requests end, are cancelled and preempted, and slots get others, while a later step is launched already."""
    expected, cut, _ = serve(seed, overlaps=False)
    found, cut_later, device = serve(seed, overlaps=True)
    assert device.n_overlaps > 20
    assert any(request.n_preempted for request in found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        n = min(len(one.token_ids), len(other.token_ids))
        assert one.token_ids[:n] == other.token_ids[:n]
        assert number in cut | cut_later or len(one.token_ids) == len(other.token_ids)
        assert [row.token_id for row in one.prompt_logprobs] == [row.token_id for row in other.prompt_logprobs]
