"""Log-probabilities against float64, for any split of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.collectives import Communicator
from services.compute.token_logprobs import TokenLogprobs
from tests.unit.compute.sampling.drawing import draw, make_sampler, part_of
from tests.unit.compute.sampling.thread_group import on_ranks

VOCAB = 64


def check(actual: TokenLogprobs, logits: torch.Tensor, token: int, n_top: int) -> None:
    exact = torch.log_softmax(logits.double(), dim=0)
    order = sorted(range(VOCAB), key=lambda i: (-logits[i].item(), i))
    assert actual.token_id == token
    assert actual.rank == order.index(token) + 1
    assert actual.logprob == pytest.approx(exact[token].item(), abs=2e-6)
    assert actual.top_ids == tuple(order[:n_top])
    assert actual.top_logprobs == pytest.approx([exact[i].item() for i in order[:n_top]], abs=2e-6)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_drawn_tokens_are_scored_before_filters_and_penalties(ranks: int) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(6)) * 4
    logits[2] = logits[2].round()  # ties
    params = [
        Sampling(logprobs=0),
        Sampling(),
        Sampling(temperature=1.5, top_k=20, seed=3, logprobs=5, logit_bias={7: 100.0}),
        Sampling(temperature=0.5, repetition_penalty=1.5, seed=4, logprobs=20),
    ]
    draws = draw(logits.clone(), params, known=[[1, 2, 3]] * 4, ranks=ranks)
    assert draws.token_ids[2] == 7
    assert set(draws.logprobs) == {0, 2, 3}
    for row in (0, 2, 3):
        check(draws.logprobs[row], logits[row], int(draws.token_ids[row]), params[row].logprobs or 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_prompt_tokens_are_scored(ranks: int) -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(7)) * 4
    following = np.arange(9) * 7 % VOCAB

    def body(comm: Communicator) -> list[TokenLogprobs]:
        return make_sampler(comm, VOCAB, 1).score_prompt(part_of(logits, comm), following, 3)

    for actual in on_ranks(ranks, body):
        for row in range(9):
            check(actual[row], logits[row], int(following[row]), 3)


def test_more_top_tokens_than_a_rank_holds() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(8))
    draws = draw(logits.clone(), [Sampling(logprobs=40)], ranks=4)
    check(draws.logprobs[0], logits[0], int(draws.token_ids[0]), 40)
