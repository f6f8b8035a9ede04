"""Replayed decodes of layers with a state save copies of it where the step says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.compute.backends.collectives import SingleRank
from services.compute.backends.states import StateRows
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.test_capture import RECURRENT, DecoderPair
from tests.unit.compute.model.checkpoints import written_once
from tests.unit.compute.model.zoo import prompt


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written_once(RECURRENT, tmp_path_factory, torch.bfloat16)


@pytest.mark.parametrize("name", RECURRENT)
def test_decodes_of_one_sequence_advance_its_state_in_turn(
    kernels: Bfloat16Kernels, checkpoint: Callable[[str], Path], name: str
) -> None:
    """So are generated tokens computed again that attend to some keys only; a replay would advance it at once."""
    pair = DecoderPair(checkpoint(name), SingleRank(), kernels)
    others = [pair.admit(prompt(8, 203, seed)) for seed in range(3)]
    pair.step([(other, 1) for other in others])
    assert pair.replays
    index = pair.admit(prompt(12, 203, 3))
    pair.step([(index, 5)])
    (engine, alone), (request, in_turn) = pair._engines, pair._requests[index]
    whole = engine.batch([(request, 3)])
    joined = replace(
        whole,
        query_starts=(0, 1, 2, 3),
        context_lens=(6, 7, 8),
        block_tables=whole.block_tables.repeat(3, 1),
        n_decode=3,
        segments=tuple(StateRows(row, row + 1, request.slot) for row in range(3)),
    )
    hidden = engine.model.forward(joined, engine.cache)
    assert torch.equal(hidden, torch.cat([alone.step([(in_turn, 1)])[0] for _ in range(3)]))


@pytest.mark.parametrize("name", RECURRENT)
def test_replayed_decodes_save_states(kernels: Bfloat16Kernels, checkpoint: Callable[[str], Path], name: str) -> None:
    pair = DecoderPair(checkpoint(name), SingleRank(), kernels)
    index = pair.admit(prompt(8, 203))
    pair.step([(index, 5)])
    for save in (40, -1, 41):
        for engine, request in zip(pair._engines, pair._requests[index], strict=True):
            batch = engine.batch([(request, 1)])
            segments = tuple(replace(segment, save=save) for segment in batch.segments)
            engine.model.forward(replace(batch, segments=segments), engine.cache)
            request.computed += 1
    assert pair.replays
    first, second = (engine.cache.states for engine in pair._engines)
    assert first is not None
    assert second is not None
    for ours, others in zip(first.layers, second.layers, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))
    assert all(not torch.equal(part[40], part[41]) for parts in first.layers for part in parts)
    assert all(torch.equal(part[0], part[41]) for parts in first.layers for part in parts)
