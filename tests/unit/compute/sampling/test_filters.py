"""Top-k, top-p and min-p against a straightforward float64 reference, for any split of the vocabulary."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from services.compute.backends.collectives import Communicator
from services.compute.backends.torch import logit_shard
from services.compute.backends.torch.logit_shard import TorchLogitShard
from services.compute.sampling import filters
from services.compute.sampling.filters import Limits, filter_rows
from tests.unit.compute.sampling.drawing import part_of
from tests.unit.compute.sampling.thread_group import on_ranks

VOCAB = 48


def reference(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """Return the kept tokens of a row, and how near a decision was to its threshold."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if top_k:
        order = order[:top_k]
    weights = np.exp(logits[order] - logits[order[0]])
    before = (np.cumsum(weights) - weights) / weights.sum()
    keep = (before < top_p) | (top_p >= 1.0)
    keep &= weights >= min_p * weights[0]
    keep[0] = True
    margins = [np.abs(before[1:] - top_p).min()] if len(order) > 1 and top_p < 1.0 else []
    if min_p:
        margins.append(np.abs(weights / weights[0] - min_p).min())
    return {token for token, stored in zip(order, keep, strict=True) if stored}, min(margins, default=1.0)


def kept_tokens(logits: torch.Tensor, limits: Limits, ranks: int) -> list[set[int]]:
    def body(comm: Communicator) -> list[set[int]]:
        part = part_of(logits, comm)
        tokens: dict[int, set[int]] = {}
        shard = TorchLogitShard(comm.rank * part.shape[1], part.shape[1], torch.device("cpu"))
        for actual in filter_rows(comm, shard, part, limits):
            for row, ids, stored in zip(actual.rows.tolist(), actual.token_ids, actual.allowed, strict=True):
                assert row not in tokens
                tokens[row] = set(ids[stored].tolist())
        return [tokens[row] for row in range(len(logits))]

    actual = on_ranks(ranks, body)
    assert actual == [actual[0]] * ranks
    return actual[0]


rows = st.tuples(
    st.integers(0, 2**31),  # seed of the logits
    st.sampled_from([0.0, 0.25, 1.0]),  # quantum: coarse logits tie often
    st.sampled_from([0.5, 3.0, 8.0]),  # spread
    st.sampled_from([0, 0, 1, 3, 7, 47, 200]),
    st.sampled_from([1.0, 1.0, 0.1, 0.5, 0.9, 0.999]),
    st.sampled_from([0.0, 0.0, 0.05, 0.5]),
)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@given(st.lists(rows, min_size=1, max_size=4), st.sampled_from([1, 3, 64]))
@example([(0, 0.0, 0.5, 47, 0.9, 0.0)], 1)  # offers exactly as wide as top_k
def test_kept_tokens_are_the_references(ranks: int, wanted: list, first_width: int) -> None:
    logits = torch.empty(len(wanted), VOCAB)
    expected = []
    for i, (seed, quantum, spread, top_k, top_p, min_p) in enumerate(wanted):
        row = torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread
        logits[i] = (row / quantum).round() * quantum if quantum else row
        tokens, margin = reference(logits[i].double().numpy(), top_k, top_p, min_p)
        assume(margin > 1e-5)  # float32 and float64 may differ on the threshold itself
        expected.append(tokens)
    columns = list(zip(*wanted, strict=True))
    limits = Limits(np.array(columns[3]), np.array(columns[4]), np.array(columns[5]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(filters, "_FIRST_WIDTH", first_width)  # narrow offers must widen to the same answer
        patch.setattr(filters, "_SLACK", 0)
        patch.setattr(logit_shard, "_FOLD", 3)  # stacks of columns, and columns left over, also in a small vocabulary
        assert kept_tokens(logits, limits, ranks) == expected


@pytest.mark.parametrize(
    ("limits", "warper"),
    [
        ((9, 1.0, 0.0), TopKLogitsWarper(9)),
        ((0, 0.8, 0.0), TopPLogitsWarper(0.8)),
        ((0, 1.0, 0.07), MinPLogitsWarper(0.07)),
    ],
)
def test_same_tokens_as_transformers(limits: tuple[int, float, float], warper: object) -> None:
    logits = torch.randn(16, VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    survivors = warper(torch.zeros(16, 1, dtype=torch.int64), logits.clone())  # type: ignore[operator]
    expected = [set(torch.isfinite(row).nonzero().flatten().tolist()) for row in survivors]
    columns = [np.full(16, value) for value in limits]
    assert kept_tokens(logits, Limits(*columns), 2) == expected


def test_masked_and_padded_tokens_are_never_kept() -> None:
    logits = torch.randn(2, VOCAB)
    logits[:, 40:] = -torch.inf
    logits[1, 3:] = -torch.inf
    limits = Limits(np.array([0, 20]), np.array([0.999999, 1.0]), np.array([0.0, 0.0]))
    first, second = kept_tokens(logits, limits, 4)
    assert first <= set(range(40))
    assert second == {0, 1, 2}
