from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.evaluate import start_token
from bench.evaluation.metrics import compare
from bench.evaluation.offline import cut_prompts, score_offline
from bench.evaluation.served import Position, ScoredDocument
from bench.evaluation.text import Document
from services.worker.settings import WorkerSettings
from tests.models import BUNDLED_MODEL

SHORT = Document(
    "short.py", "library", "def add(a, b):\n    return a + b\n\n\nfor i in range(10):\n    print(add(i, 1))\n"
)


def position(*probabilities: float, best: int = 0) -> Position:
    """The text's own token is number 0."""
    known = {token_id: math.log(p) for token_id, p in enumerate(probabilities)}
    return Position(known[0], best, known)


def scored(name: str, *positions: Position) -> ScoredDocument:
    return ScoredDocument(Document(name, "library", "x" * 4 * len(positions)), positions)


def test_measures_weigh_tokens_and_intervals_draw_documents() -> None:
    reference = [scored("a", position(0.5)), scored("b", position(0.25), position(0.25), position(0.25))]
    candidate = [scored("a", position(0.5)), scored("b", *[position(0.125, best=1)] * 3)]
    result = compare(reference, candidate)
    assert result.reference_perplexity.value == pytest.approx(2 ** (7 / 4))
    assert result.perplexity_ratio.value == pytest.approx(2 ** (3 / 4))
    assert result.bits_per_byte.value == pytest.approx(10 / 16)
    assert result.top1_agreement.value == 0.25
    # Two documents: some draws hold only the first, some only the second.
    assert result.perplexity_ratio.interval == pytest.approx((1, 2))


def reference_nats(context: int) -> float:
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    model = AutoModelForCausalLM.from_pretrained(BUNDLED_MODEL, dtype=torch.float32)
    ids = torch.tensor([[start_token(BUNDLED_MODEL), *tokenizer(SHORT.text, add_special_tokens=False).input_ids]])
    assert ids.shape[1] < context
    with torch.inference_mode():
        return float(model(ids, labels=ids).loss)


async def test_scores_of_formats_equal_transformers() -> None:
    expected = math.exp(reference_nats(context=1_024))
    settings = WorkerSettings(model=str(BUNDLED_MODEL), dtype="float32", max_model_len=1_024, kv_tokens=2_048)
    prompts = [cut_prompts(BUNDLED_MODEL, [SHORT], start_token(BUNDLED_MODEL), window)[0] for window in (1_024, 10)]
    actual, part = await score_offline(settings, prompts)
    assert actual.document.text == SHORT.text
    assert compare([actual], [actual]).perplexity.value == pytest.approx(expected, rel=1e-4)
    assert len(part.positions) == 9
    assert SHORT.text.startswith(part.document.text)
