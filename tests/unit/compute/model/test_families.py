"""Every family computes what transformers computes, on every backend, however the prompt is cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.collectives import SingleRank
from services.compute.model.build import load_model
from services.compute.model.decoder import Decoder
from services.compute.model.registry import describe, read_spec
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.harness import CachedDecoder
from tests.unit.compute.model.zoo import VARIANTS

FULL: list[int] = []
CHUNKED = [5, 1, 17, 2, 1]
DECODED = [20, *[1] * 6]
# Of a row's logits, by norm, in the median row. The worst may be off by more: a router at a tie takes another expert.
TYPICAL_ERROR = {torch.bfloat16: 0.04, torch.float16: 0.006}
WORST_ERROR = {torch.bfloat16: 0.3, torch.float16: 0.05}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_transformers(variant: str, backend: ModelBackend, sample: Callable[[str], Sample]) -> None:
    """Of all rows, of rows that go on from any index, and of last rows alone."""
    expected = sample(variant)
    model = load_model(describe(expected.folder), SingleRank(), backend)
    assert model.spec == read_spec(expected.folder)
    vocab = expected.logits.shape[1]
    for chunks in (FULL, CHUNKED, DECODED):
        logits = model.logits(CachedDecoder(model).run(expected.ids, chunks)).cpu()
        assert logits.dtype is torch.float32
        assert torch.isneginf(logits[:, vocab:]).all()
        assert (logits[:, :vocab] - expected.logits).abs().max() <= 1e-4
        assert torch.equal(logits.argmax(-1), expected.logits.argmax(-1))
    for hidden, rows in zip(continued(model, expected.ids), (expected.logits[:-1], expected.logits[1:]), strict=True):
        assert (model.logits(hidden).cpu()[:, :vocab] - rows).abs().max() <= 1e-4
    engine, n_ids = CachedDecoder(model), len(expected.ids)
    first, second = engine.admit(expected.ids), engine.admit(expected.ids)
    assert engine.last_rows([(first, 7), (second, 12)], []).shape == (0, model.spec.hidden_size)
    some = model.logits(engine.last_rows([(first, 1), (second, n_ids - 12)], [0, 1])).cpu()
    assert (some[:, :vocab] - expected.logits[[7, -1]]).abs().max() <= 1e-4
    rest = model.logits(engine.last_rows([(first, n_ids - 8)], [0])).cpu()
    assert (rest[:, :vocab] - expected.logits[-1:]).abs().max() <= 1e-4


def continued(model: Decoder, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Take the sequence over at every index, as another worker does: compute all tokens up to it, then decode the next.

    Returns the states of each sequence's last row after both steps, [len(ids) - 1, hidden_size].
    """
    engine, indices = CachedDecoder(model), range(1, len(ids))
    sequences = [engine.admit(ids) for _ in indices]
    known = engine.step(list(zip(sequences, indices, strict=True)))
    added = engine.step([(sequence, 1) for sequence in sequences])
    return torch.stack([rows[-1] for rows in known]), torch.stack([rows[-1] for rows in added])


@pytest.mark.parametrize("variant", VARIANTS)
def test_in_half_precision_logits_are_near_transformers(
    variant: str, half: ModelBackend, sample: Callable[[str], Sample]
) -> None:
    expected = sample(variant)
    model = load_model(describe(expected.folder), SingleRank(), half)
    for chunks in (FULL, DECODED):
        logits = model.logits(CachedDecoder(model).run(expected.ids, chunks)).cpu()[:, : expected.logits.shape[1]]
        error = (logits - expected.logits).norm(dim=-1) / expected.logits.norm(dim=-1)  # [n]
        assert error.median() <= TYPICAL_ERROR[half.dtype]
        assert error.max() <= WORST_ERROR[half.dtype]
