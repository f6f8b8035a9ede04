"""Draws without a wait for the device equal those with one, for every filter and any split."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.collectives import Communicator
from services.compute.backends.cuda.ops import CudaOps
from services.compute.sampling import sampler
from tests.unit.compute.backends.tape import Unasked
from tests.unit.compute.sampling.drawing import CPU, admission, make_sampler, part_of
from tests.unit.compute.sampling.not_finite import NOT_FINITE, check_no_token, check_no_token_on_device
from tests.unit.compute.sampling.thread_group import on_ranks

VOCAB = 64
CUDA_OPS = CudaOps(torch.float32, CPU)


@dataclass(frozen=True)
class Row:
    """A request, and how its logits look: those of a coarse `quantum` tie often, as products in bfloat16 do."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    quantum: float

    def params(self) -> Sampling:
        limits = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        return Sampling(temperature=self.temperature, seed=self.seed, **limits)

    def logits(self) -> torch.Tensor:
        row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(self.seed)) * 3
        return (row / self.quantum).round() * self.quantum if self.quantum else row


ROWS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 5, 40, 63, 200]),
    top_p=st.sampled_from([1.0, 1.0, 0.1, 0.6, 0.95, 0.9999]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3]),
    seed=st.integers(0, 2**40),
    quantum=st.sampled_from([0.0, 0.25, 1.0]),
)


FLAT = [Row(1.0, 3, 1.0, 0.0, seed, 1000.0) for seed in range(30)]  # the last of the tokens that top_k keeps wins often


@pytest.mark.parametrize("ranks", [1, 2])
@given(rows=st.lists(ROWS, min_size=1, max_size=5), position=st.integers(1, 1 << 20))
@example(rows=FLAT, position=9)
def test_tokens_equal_those_of_synchronous_draws(ranks: int, rows: list[Row], position: int) -> None:
    n, logits = len(rows), torch.stack([row.logits() for row in rows])
    slots, positions = np.arange(n)[::-1].copy(), np.arange(n) + position

    def body(comm: Communicator) -> tuple[list[int], list[int]]:
        sampler = make_sampler(comm, VOCAB, n, CUDA_OPS)
        for slot, row in zip(slots.tolist(), rows, strict=True):
            sampler.admit(*admission(slot, row.params(), [0], 1))
        numbers = sampler.numbers(slots, positions)
        assert numbers is not None
        draws = numbers.draws([torch.from_numpy(array) for array in numbers.arrays()])
        with Unasked():
            actual = sampler.draw_on_device(part_of(logits, comm), draws)
        return actual.tolist(), sampler.draw(part_of(logits, comm), slots, positions).token_ids.tolist()

    for actual, expected in on_ranks(ranks, body):
        assert actual == expected


@pytest.mark.parametrize("wrong", NOT_FINITE)
@pytest.mark.parametrize("ranks", [1, 2])
def test_row_without_finite_logits_draws_no_token(wrong: str, ranks: int) -> None:
    check_no_token(wrong, ranks)
    check_no_token_on_device(wrong, ranks, CUDA_OPS)


@pytest.mark.parametrize(
    "params",
    [
        Sampling(repetition_penalty=1.2),
        Sampling(logit_bias={3: 1.0}),
        Sampling(min_tokens=3),
        Sampling(grammar="%llguidance {}"),
        Sampling(logprobs=0),
        Sampling(temperature=1.0, top_p=0.9, frequency_penalty=0.3),
    ],
)
def test_rows_that_need_the_host_wait(params: Sampling) -> None:
    for slots in ([0], [1, 0]):

        def body(comm: Communicator, slots: list[int] = slots) -> bool:
            sampler = make_sampler(comm, VOCAB, 2)
            sampler.admit(*admission(0, params, [0], 1))
            sampler.admit(*admission(1, Sampling(temperature=1.0, top_k=4), [0], 1))
            return sampler.numbers(np.array(slots), np.array(slots)) is None

        assert on_ranks(1, body) == [True]


def test_steps_that_would_sort_much_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with top_k do not: their candidates are few."""
    monkeypatch.setattr(sampler, "_MOST_SORTED", 2 * VOCAB)

    def body(comm: Communicator) -> list[bool]:
        drawn = make_sampler(comm, VOCAB, 4)
        for slot in range(4):
            drawn.admit(*admission(slot, Sampling(temperature=1.0, top_p=0.9, top_k=4 * (slot == 3)), [0], 1))
        return [drawn.numbers(np.array(slots), np.array(slots)) is None for slots in ([0, 1], [0, 1, 2], [3, 3, 3])]

    assert on_ranks(2, body) == [[False, True, False]] * 2
