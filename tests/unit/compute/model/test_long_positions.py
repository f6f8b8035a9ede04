"""Beyond the context of the first training, and beyond one block of keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.compute.model.spec import ModelError
from tests.unit.compute.model.harness import CPU, CachedDecoder
from tests.unit.compute.model.zoo import VARIANTS, make, prompt, reference_logits, rope, write_checkpoint


def test_dynamic_scaling_generates_like_transformers(tmp_path: Path) -> None:
    """The base grows with every token; keys keep the rotation they were cached with."""
    config = make("LlamaConfig", max_position_embeddings=24, **rope(rope_type="dynamic", factor=2.0))
    reference = write_checkpoint(config(), tmp_path)
    ids = prompt(44)
    expected, past = [], None
    with torch.no_grad():
        for start, end in ((0, 20), *((i, i + 1) for i in range(20, len(ids)))):
            output = reference(torch.tensor([ids[start:end]]), past_key_values=past, use_cache=True)
            expected.append(output.logits[0])
            past = output.past_key_values
    model = load_model(describe(tmp_path), SingleRank(), open_backend(torch.float32, CPU))
    assert model.spec.max_positions == 48
    for chunks in ([20, *[1] * 24], [], [7, 30]):
        logits = model.logits(CachedDecoder(model).run(ids, chunks))[:, :99]
        assert (logits - torch.cat(expected)).abs().max() <= 1e-4


@pytest.mark.parametrize("window", [30, 600])
def test_a_window_far_behind_the_first_key_block(window: int, tmp_path: Path) -> None:
    config = make("MistralConfig", max_position_embeddings=2048, sliding_window=window)
    reference = write_checkpoint(config(), tmp_path)
    ids = prompt(1300)
    model = load_model(describe(tmp_path), SingleRank(), open_backend(torch.float32, CPU))
    logits = model.logits(CachedDecoder(model).run(ids, [700, 1, 1, 580, *[1] * 10]))[:, :99]
    assert (logits - reference_logits(reference, ids)).abs().max() <= 1e-4


def test_a_shorter_limit_chooses_the_short_factors(tmp_path: Path) -> None:
    """LongRoPE: served for no more than the original context, the model keeps its short factors."""
    reference = write_checkpoint(VARIANTS["phi3_longrope"](), tmp_path)
    ids = prompt(30)  # within the original 32
    expected = reference_logits(reference, ids)
    short = load_model(describe(tmp_path), SingleRank(), open_backend(torch.float32, CPU), max_positions=32)
    assert (short.logits(CachedDecoder(short).run(ids, []))[:, :99] - expected).abs().max() <= 1e-4
    long = load_model(describe(tmp_path), SingleRank(), open_backend(torch.float32, CPU))
    assert (long.logits(CachedDecoder(long).run(ids, []))[:, :99] - expected).abs().max() > 1e-3


def test_blocks_that_cross_chunks_are_refused(tmp_path: Path) -> None:
    write_checkpoint(VARIANTS["llama4"](), tmp_path)
    model = load_model(describe(tmp_path), SingleRank(), open_backend(torch.float32, CPU))
    with pytest.raises(ModelError, match=r"attention_chunk_size: expected a multiple of the 7 tokens of a block"):
        model.make_cache(1, 7)
