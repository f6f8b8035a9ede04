"""Samples follow the softmax, and depend on nothing but seed, position and logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends import keys
from services.compute.backends.collectives import SingleRank
from services.compute.backends.noise import gumbel, row_words
from services.compute.sampling.slots import SlotParams
from tests.unit.compute.sampling.drawing import admission, draw, make_sampler

VOCAB = 64


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    degrees = len(counts) - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / np.sqrt(2 * degrees))


def histogram(params: Sampling, logits: torch.Tensor, n: int, seeds: bool) -> np.ndarray:
    """Draw n times: at n positions of one request, or at one position of n requests."""
    sampler = make_sampler(SingleRank(), VOCAB, n if seeds else 1)
    for slot in range(n if seeds else 1):
        fields = {name: getattr(params, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        sampler.admit(*admission(slot, Sampling(**fields, seed=slot), [0], 1))
    slots = np.arange(n) if seeds else np.zeros(n, np.int64)
    positions = np.full(n, 5) if seeds else np.arange(n)
    tokens = sampler.draw(logits.expand(n, -1).clone(), slots, positions).token_ids
    return np.bincount(tokens, minlength=VOCAB)


@pytest.mark.parametrize(("sent", "computed"), [(1e-46, 0), (1e-42, 0), (1e-38, 0), (9e-6, 0), (2e-5, 2e-5), (1, 1)])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(sent: float, computed: float) -> None:
    params = SlotParams(1)
    params.set(0, Sampling(temperature=sent, top_p=0.5), 1)
    assert params.temperature[0] == pytest.approx(computed)
    assert params.filtered[0] == bool(computed)


@pytest.mark.parametrize("seeds", [False, True])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_samples_follow_the_softmax(temperature: float, seeds: bool) -> None:
    n = 40_000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    expected = n * torch.softmax(logits[0].double() / temperature, dim=0).numpy()
    counts = histogram(Sampling(temperature=temperature), logits, n, seeds)
    assert abs(chi_square(counts, expected)) < 4.5


def test_filtered_samples_follow_the_renormalised_softmax() -> None:
    n = 40_000
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    stored = torch.topk(logits[0].double(), 10)
    expected = n * torch.softmax(stored.values, dim=0).numpy()
    counts = histogram(Sampling(temperature=1.0, top_k=10), logits, n, False)
    assert counts.sum() == counts[stored.indices.numpy()].sum() == n
    assert abs(chi_square(counts[stored.indices.numpy()], expected)) < 4.5


def noise_of(seeds: list[int], positions: list[int], ids: torch.Tensor) -> torch.Tensor:
    signed = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64))
    return gumbel(row_words(signed, torch.tensor(positions)), ids)


def test_noise_is_gumbel_and_uncorrelated() -> None:
    noise = noise_of([7] * 200, list(range(200)), torch.arange(2000)).double()
    assert torch.isfinite(noise).all()
    assert abs(noise.mean().item() - 0.5772157) < 0.01
    assert abs(noise.var().item() - np.pi**2 / 6) < 0.02
    flat = noise - noise.mean()
    for shifted in (flat.roll(1, 0), flat.roll(1, 1), flat.roll((1, 1), (0, 1))):
        assert abs((flat * shifted).mean().item()) < 0.012  # 5 standard errors of 400,000 products


def test_noise_depends_on_exactly_its_three_arguments() -> None:
    ids = torch.arange(50)
    reference = noise_of([3], [9], ids)
    assert torch.equal(noise_of([8, 3, 1], [9, 9, 4], ids)[1], reference[0])
    assert torch.equal(noise_of([3], [9], ids[20:30]), reference[:, 20:30])
    for seed, position in ((4, 9), (3, 10), (3 + 2**32, 9), (2**63 + 3, 9)):
        assert not torch.equal(noise_of([seed], [position], ids), reference)


def test_a_row_draws_the_same_alone_and_in_a_batch() -> None:
    generator = torch.Generator().manual_seed(3)
    kinds = [
        Sampling(),
        Sampling(temperature=1.0, seed=11),
        Sampling(temperature=0.8, top_p=0.9, seed=12),
        Sampling(temperature=1.2, top_k=5, seed=13),
        Sampling(temperature=0.9, min_p=0.1, repetition_penalty=1.3, seed=14),
    ]
    params = [kinds[i % len(kinds)] for i in range(20)]
    known = [[i, i + 1, i + 2] for i in range(20)]
    logits = torch.randn(20, VOCAB, generator=generator)
    together = draw(logits, params, known=known, n_prompt=2).token_ids
    order = np.random.default_rng(0).permutation(20)
    shuffled = draw(logits[order], [params[i] for i in order], known=[known[i] for i in order], n_prompt=2)
    assert np.array_equal(shuffled.token_ids, together[order])
    for i in range(20):
        alone = draw(logits[i : i + 1], [params[i]], known=[known[i]], n_prompt=2)
        assert alone.token_ids[0] == together[i]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ties_resolve_to_the_lowest_id(ranks: int) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [50, 17, 49, 33]] = 3.0
    logits[0, 5] = -0.0
    assert draw(logits, [Sampling()], ranks=ranks).token_ids.tolist() == [17]
    flat = draw(torch.zeros(1, VOCAB), [Sampling(logprobs=3)], ranks=ranks)
    assert flat.token_ids.tolist() == [0]
    assert flat.logprobs[0].top_ids == (0, 1, 2)


def test_keys_order_by_value_then_by_lowest_id() -> None:
    inf = float("inf")
    values = torch.tensor([-inf, -3.5, -1e-40, -0.0, 0.0, 1e-40, 2.0, 2.0, inf])
    ids = torch.tensor([0, 4, 7, 3, 2, 9, 5, 1, 8])
    packed = keys.pack(values, ids)
    order = torch.sort(packed, descending=True).indices.tolist()
    assert order == sorted(range(9), key=lambda i: (-values[i].item(), ids[i].item()))
    assert torch.equal(keys.token_ids_of(packed), ids)
    assert torch.equal(keys.values_of(packed), values)
