"""The race of a row's tokens by our kernel, against the one by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends import keys
from services.compute.backends.base import LogitShard
from services.compute.backends.cpu.logit_shard import KernelLogitShard
from services.compute.backends.cpu.ops import KernelOps
from services.compute.backends.noise import gumbel, row_words
from services.compute.backends.torch.logit_shard import TorchLogitShard
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.conftest import OnThreads
from tests.unit.compute.sampling.drawing import chances, draw
from tests.unit.compute.sampling.not_finite import NOT_FINITE, check_no_token

CPU = torch.device("cpu")
ROUNDING = 4e-6  # error of a score of up to about 25


def _logits(seed: int, n: int, columns: int) -> torch.Tensor:
    return torch.randn(n, columns, generator=torch.Generator().manual_seed(seed)) * 3


def _run(shard: LogitShard, logits: torch.Tensor, temperature: float, seed: int) -> torch.Tensor:
    """Rows by turns greedy and at `temperature`, each with a seed and a position of its own."""
    n = len(logits)
    heat = np.where(np.arange(n) % 3 == 0, 0, temperature).astype(np.float32)
    seeds = np.arange(n, dtype=np.uint64) + np.uint64(seed)
    return shard.sample(logits.clone(), chances(heat, seeds, np.arange(n) * 7 + seed % 1000))


@given(
    n=st.integers(1, 20),
    sixteens=st.integers(1, 40),
    first_id=st.integers(0, 200_000),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    seed=st.integers(0, 2**64 - 100),
)
def test_the_winner_equals_the_winner_in_torch(
    kernels: Bfloat16Kernels, n: int, sixteens: int, first_id: int, temperature: float, seed: int
) -> None:
    logits = _logits(seed % 97, n, 16 * sixteens)
    actual = _run(KernelLogitShard(first_id, kernels), logits, temperature, seed)
    expected = _run(TorchLogitShard(first_id, 16 * sixteens, CPU), logits, temperature, seed)
    assert (keys.values_of(actual) - keys.values_of(expected)).abs().max() <= ROUNDING
    other = keys.token_ids_of(actual) != keys.token_ids_of(expected)
    assert not other[::3].any()  # without noise nothing is rounded
    # With it, two tokens may come so close that rounding decides.
    for row in other.nonzero().flatten().tolist():
        assert _lead(logits[row], first_id, temperature, seed, row) <= ROUNDING


def _lead(row: torch.Tensor, first_id: int, temperature: float, seed: int, i: int) -> float:
    """By how much the best token of row `i` is better than the second."""
    noise = gumbel(_words(seed + i, i * 7 + seed % 1000), torch.arange(first_id, first_id + len(row)))
    best = (row / temperature + noise[0]).topk(2).values
    return float(best[0] - best[1])


def _words(seed: int, position: int) -> torch.Tensor:
    return row_words(torch.from_numpy(np.array([seed], np.uint64).view(np.int64)), torch.tensor([position]))


@pytest.mark.parametrize("most", [False, True])
def test_noise_is_precise_to_its_ends(kernels: Bfloat16Kernels, most: bool) -> None:
    """The least and the most that a million tokens get: a hash near 0 and one so high that it would round to 1."""
    seed, position, ids = 5, 77, torch.arange(1 << 20)
    noise = gumbel(_words(seed, position), ids)[0]
    for token in torch.topk(noise, 20, largest=most).indices.tolist():
        logits = torch.full((1, 16), -torch.inf)
        logits[0, token % 16] = 0.0
        heat, seeds, positions = torch.ones(1), torch.tensor([seed]), torch.tensor([position])
        key = kernels.draw(logits, token - token % 16, heat, seeds, positions)
        assert keys.token_ids_of(key).item() == token
        assert abs(keys.values_of(key).item() - noise[token].item()) <= 2e-6 * max(1.0, abs(noise[token].item()))


def test_a_row_is_independent_of_the_batch_and_of_threads(on_threads: OnThreads) -> None:
    logits = _logits(4, 33, 512)
    together = _run(KernelLogitShard(64, on_threads(3)), logits, 0.8, 9)
    assert torch.equal(_run(KernelLogitShard(64, on_threads(1)), logits, 0.8, 9), together)
    heat, seeds, positions = torch.full((1,), 0.8), torch.tensor([10]), torch.tensor([16])
    assert torch.equal(on_threads(3).draw(logits[1:2], 64, heat, seeds, positions), together[1:2])


def test_ties_resolve_to_the_lowest_id(kernels: Bfloat16Kernels) -> None:
    logits = torch.zeros(3, 64)
    logits[0, [50, 17, 49, 33]] = 3.0
    logits[1, :5] = -0.0
    logits[2] = -torch.inf
    heat, (seeds, positions) = torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64)
    assert keys.token_ids_of(kernels.draw(logits, 100, heat, seeds, positions)).tolist() == [117, 100, 100]


@pytest.mark.parametrize("wrong", NOT_FINITE)
def test_row_without_finite_logits_draws_no_token(kernels: Bfloat16Kernels, wrong: str) -> None:
    for ranks in (1, 2):
        check_no_token(wrong, ranks, KernelOps(kernels))


@pytest.mark.parametrize("ranks", [2, 4])
def test_several_ranks_draw_like_a_single_rank(kernels: Bfloat16Kernels, ranks: int) -> None:
    """All kinds of requests in one step: those whose tokens race, and those that are filtered, biased or scored."""
    kinds = [
        Sampling(),
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.8, top_p=0.9, seed=12),
        Sampling(temperature=0.9, repetition_penalty=1.3, seed=13),
        Sampling(temperature=1.1, seed=14, logprobs=2),
        Sampling(logit_bias={40: 3.0}),
    ]
    for n in (2, 3, 12):
        params, logits = [kinds[i % len(kinds)] for i in range(n)], _logits(n, n, 64)
        one = draw(logits, params, ops=KernelOps(kernels))
        assert np.array_equal(draw(logits, params, ranks=ranks, ops=KernelOps(kernels)).token_ids, one.token_ids)
        assert np.array_equal(draw(logits, params).token_ids, one.token_ids)
