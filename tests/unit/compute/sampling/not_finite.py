"""Rows whose logits are not finite, among others of every kind of request."""

from __future__ import annotations

import numpy as np
import torch
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.backends.base import Ops
from services.compute.backends.collectives import Communicator
from services.compute.token_logprobs import NO_TOKEN
from tests.unit.compute.sampling.drawing import TORCH, admission, draw, make_sampler, part_of
from tests.unit.compute.sampling.thread_group import on_ranks

VOCAB = 64
ON_DEVICE = [Sampling(), Sampling(temperature=0.8, seed=3), Sampling(temperature=0.8, seed=3, top_k=5, top_p=0.9)]
ON_HOST = [Sampling(repetition_penalty=1.3), Sampling(logprobs=3), Sampling(logit_bias={7: 2.0})]
_RISING = torch.arange(VOCAB).float()
NOT_FINITE = {
    "nan": torch.full((VOCAB,), torch.nan),
    "negative nan": -torch.full((VOCAB,), torch.nan),  # inf - inf on x86
    "one nan": _RISING.index_fill(0, torch.tensor(40), -torch.nan),
    "one inf": _RISING.index_fill(0, torch.tensor(0), torch.inf),
    "-inf": torch.full((VOCAB,), -torch.inf),
}


def check_no_token(wrong: str, ranks: int, ops: Ops = TORCH) -> None:
    """Check that every other row, whose logits are `wrong`, draws no token, and the rest what it drew without them."""
    params = [one for one in ON_DEVICE + ON_HOST for _ in range(2)]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(1))
    expected = draw(logits, params, ranks=ranks, ops=ops).token_ids
    logits[1::2] = NOT_FINITE[wrong]
    drawn = draw(logits, params, ranks=ranks, ops=ops).token_ids
    assert drawn[1::2].tolist() == [NO_TOKEN] * (len(params) // 2)
    assert np.array_equal(drawn[::2], expected[::2])


def check_no_token_on_device(wrong: str, ranks: int, ops: Ops) -> None:
    """The same for draws that do not wait for the host."""
    n, slots = len(ON_DEVICE), np.arange(len(ON_DEVICE))

    def body(comm: Communicator) -> list[int]:
        sampler = make_sampler(comm, VOCAB, n, ops)
        for slot, params in enumerate(ON_DEVICE):
            sampler.admit(*admission(slot, params, [0], 1))
        numbers = sampler.numbers(slots, slots)
        assert numbers is not None
        draws = numbers.draws([torch.from_numpy(array) for array in numbers.arrays()])
        drawn: list[int] = sampler.draw_on_device(part_of(NOT_FINITE[wrong].repeat(n, 1), comm), draws).tolist()
        return drawn

    assert on_ranks(ranks, body) == [[NO_TOKEN] * n] * ranks
