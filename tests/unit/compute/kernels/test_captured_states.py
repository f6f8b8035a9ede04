"""Replayed decodes of layers with a state save copies of it where the step says so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from services.compute.backends.collectives import SingleRank
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from tests.unit.compute.kernels.test_capture import RECURRENT, DecoderPair
from tests.unit.compute.model.checkpoints import written_once
from tests.unit.compute.model.zoo import prompt


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return written_once(RECURRENT, tmp_path_factory, torch.bfloat16)


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
