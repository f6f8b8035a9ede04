"""Penalties against transformers' processors and the published formulas; bias, minimum length; ranks agree."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from ryzanstein.v1.worker_pb2 import Sampling
from transformers import MinNewTokensLengthLogitsProcessor, RepetitionPenaltyLogitsProcessor

from services.compute.backends.collectives import Communicator, SingleRank
from services.compute.sampling.penalties import TokenCounts
from services.compute.sampling.slots import SlotParams
from tests.unit.compute.sampling.drawing import admission, draw, make_sampler, part_of
from tests.unit.compute.sampling.thread_group import on_ranks

VOCAB = 64
PROMPT, GENERATED = [1, 2, 2, 3, 40], [2, 5, 5, 5, 41, 63]


def penalised(params: Sampling, logits: torch.Tensor, later: list[int]) -> torch.Tensor:
    """Apply penalties after PROMPT and GENERATED were known and `later` was drawn."""
    counts, columns = TokenCounts(0, VOCAB), SlotParams(3)
    columns.set(2, params, len(PROMPT))
    counts.admit(2, np.array(PROMPT + GENERATED, np.int32), len(PROMPT))
    for token in later:
        counts.count([2], np.array([token]))
    counts.penalise(logits, np.array([0]), np.array([2]), columns)
    return logits


def test_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([[*PROMPT, *GENERATED, 9]])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(ids, logits.clone())
    actual = penalised(Sampling(repetition_penalty=1.7), logits.clone(), [9])
    assert torch.allclose(actual, expected, atol=1e-6)


def test_presence_and_frequency_count_only_generated_tokens() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = logits.double().clone()
    for token, n in Counter([*GENERATED, 5, 1]).items():
        expected[0, token] -= 0.6 + 0.25 * n
    actual = penalised(Sampling(presence_penalty=0.6, frequency_penalty=0.25), logits.clone(), [5, 1])
    assert torch.allclose(actual.double(), expected, atol=1e-5)


def test_a_long_answer_of_many_tokens_is_counted_to_its_end() -> None:
    counts, columns = TokenCounts(0, 300), SlotParams(1)
    columns.set(0, Sampling(frequency_penalty=1.0), 1)
    counts.admit(0, np.array([0], np.int32), 1)
    for token in [*range(1, 200), *range(1, 200)]:
        counts.count([0], np.array([token]))
    actual = torch.zeros(1, 300)
    counts.penalise(actual, np.array([0]), np.array([0]), columns)
    assert actual[0].tolist() == [0.0, *[-2.0] * 199, *[0.0] * 100]


def test_a_slot_forgets_its_former_request() -> None:
    counts, columns = TokenCounts(0, VOCAB), SlotParams(8)
    for slot in range(8):
        columns.set(slot, Sampling(presence_penalty=1.0), 1)
        counts.admit(slot, np.array([0, slot + 10], np.int32), 1)
    counts.release(3)
    counts.admit(3, np.array([0, 50], np.int32), 1)
    actual = torch.zeros(8, VOCAB)
    counts.penalise(actual, np.arange(8), np.arange(8), columns)
    for slot in range(8):
        assert actual[slot].nonzero().flatten().tolist() == [50 if slot == 3 else slot + 10]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_minimum_length_bans_end_tokens_as_transformers_does(ranks: int) -> None:
    ends = (5, 33, 60)
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[0, 33] = 50.0
    params = Sampling(min_tokens=3, stop_token_ids=ends)
    for n_generated in range(5):
        known = [1, 2, *range(10, 10 + n_generated)]
        processor = MinNewTokensLengthLogitsProcessor(2, 3, list(ends))
        expected = processor(torch.tensor([known]), logits.clone()).argmax().item()
        actual = draw(logits.clone(), [params], known=[known], n_prompt=2, ranks=ranks)
        assert actual.token_ids.tolist() == [expected]
        assert (expected == 33) == (n_generated >= 3)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bias_moves_exactly_its_tokens(ranks: int) -> None:
    logits = torch.zeros(2, VOCAB)
    params = [Sampling(logit_bias={17: 2.0, 55: 3.5}), Sampling()]
    assert draw(logits, params, ranks=ranks).token_ids.tolist() == [55, 0]
    banned = Sampling(logit_bias={token: -100.0 for token in range(VOCAB) if token != 42})
    assert draw(logits, [banned, params[1]], ranks=ranks).token_ids.tolist() == [42, 0]


def test_one_two_and_four_ranks_draw_the_same() -> None:
    """Every feature at once, over several steps with counting."""
    params = [
        Sampling(),
        Sampling(temperature=1.0, seed=2**63 + 5),
        Sampling(temperature=0.7, top_k=8, top_p=0.9, seed=1, logprobs=2),
        Sampling(temperature=2.0, top_p=0.99, seed=2),
        Sampling(temperature=1.0, min_p=0.2, presence_penalty=1.5, seed=3),
        Sampling(frequency_penalty=0.8, repetition_penalty=1.2),
        Sampling(temperature=1.0, seed=4, min_tokens=4, stop_token_ids=(3, 60), logit_bias={60: 4.0}),
    ]
    n = len(params)
    logits = torch.randn(6, n, VOCAB, generator=torch.Generator().manual_seed(9)) * 2
    logits[:, :, 62:] = -torch.inf  # padding

    def body(comm: Communicator) -> list[list[int]]:
        sampler = make_sampler(comm, VOCAB, n)
        for slot in range(n):
            sampler.admit(*admission(slot, params[slot], PROMPT, len(PROMPT)))
        return [
            sampler.draw(part_of(step, comm), np.arange(n), np.full(n, len(PROMPT) + i)).token_ids.tolist()
            for i, step in enumerate(logits)
        ]

    one = body(SingleRank())
    assert max(max(step) for step in one) < 62
    for ranks in (2, 4):
        assert on_ranks(ranks, body) == [one] * ranks
