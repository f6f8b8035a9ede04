"""The best tokens of a row and its mass by our kernels, against those by torch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends import keys
from services.compute.backends.cpu.logit_shard import KernelLogitShard
from services.compute.backends.cpu.ops import KernelOps
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.conftest import OnThreads
from tests.unit.compute.sampling.drawing import draw


@given(
    n=st.integers(1, 9),
    sixteens=st.integers(1, 40),
    share=st.floats(0, 1),
    quantum=st.sampled_from([0.0, 0.25, 3.0]),  # coarse logits tie often
    seed=st.integers(0, 999),
)
def test_the_best_tokens_have_the_highest_keys(
    kernels: Bfloat16Kernels, n: int, sixteens: int, share: float, quantum: float, seed: int
) -> None:
    logits = _logits(seed, n, 16 * sixteens, quantum)
    width = max(1, round(share * logits.shape[1]))
    actual, bound = KernelLogitShard(1000, kernels).best(logits, width)
    every = keys.pack(logits, torch.arange(1000, 1000 + logits.shape[1]))
    assert torch.equal(actual.sort(dim=-1, descending=True).values, every.topk(width, dim=-1).values)
    assert torch.equal(bound, keys.values_of(actual.amin(dim=-1, keepdim=True)))


def _logits(seed: int, n: int, columns: int, quantum: float) -> torch.Tensor:
    """With masked tokens among them, and in the last row nothing else."""
    logits = torch.randn(n, columns, generator=torch.Generator().manual_seed(seed)) * 3
    logits = (logits / quantum).round() * quantum if quantum else logits
    logits[:, ::7] = -torch.inf
    logits[1:, :][-1:] = -torch.inf
    return logits


@given(
    n=st.integers(1, 9), sixteens=st.integers(1, 300), spread=st.sampled_from([0.1, 3.0, 40.0]), seed=st.integers(0, 99)
)
def test_the_mass_is_exact(kernels: Bfloat16Kernels, n: int, sixteens: int, spread: float, seed: int) -> None:
    logits = _logits(seed, n, 16 * sixteens, 0.0) * spread - 100
    exact = torch.logsumexp(logits.double(), dim=-1, keepdim=True)
    actual = KernelLogitShard(0, kernels).mass(logits).double()
    assert torch.allclose(actual, exact, rtol=3e-7, atol=2e-6)


def test_a_row_is_independent_of_the_batch_and_of_threads(on_threads: OnThreads) -> None:
    logits = _logits(4, 33, 512, 0.0)
    one, three = KernelLogitShard(64, on_threads(1)), KernelLogitShard(64, on_threads(3))
    for row, mass in zip(logits, three.mass(logits), strict=True):
        assert torch.equal(one.mass(row.unsqueeze(0))[0], mass)
    for row, best in zip(logits, three.best(logits, 20)[0], strict=True):
        assert torch.equal(one.best(row.unsqueeze(0), 20)[0][0], best)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_filters_and_logprobs_equal_torch(kernels: Bfloat16Kernels, ranks: int) -> None:
    kinds = [
        Sampling(temperature=0.8, top_p=0.9, seed=12, logprobs=3),
        Sampling(temperature=1.5, top_k=20, seed=3, logprobs=0),
        Sampling(temperature=0.7, min_p=0.05, seed=5),
        Sampling(temperature=2.0, top_p=0.999, seed=6, logprobs=60),
    ]
    params, logits = [kinds[i % len(kinds)] for i in range(12)], _logits(2, 12, 256, 0.0)[:11]
    actual = draw(logits.clone(), params[:11], ops=KernelOps(kernels), ranks=ranks)
    expected = draw(logits.clone(), params[:11])
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    for slot, one in expected.logprobs.items():
        other = actual.logprobs[slot]
        assert (other.token_id, other.rank, other.top_ids) == (one.token_id, one.rank, one.top_ids)
        assert (other.logprob, *other.top_logprobs) == pytest.approx((one.logprob, *one.top_logprobs), abs=4e-6)
