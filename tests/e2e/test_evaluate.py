"""`make eval` measures what it says: the perplexity of a served text is the one that `transformers` computes."""

from __future__ import annotations

import asyncio
import math

import pytest

from bench.evaluate import start_token
from bench.evaluation.metrics import compare
from bench.evaluation.served import score_all
from services.cli.stack.default_model import TINY_MODEL
from tests.stack import RunningStack
from tests.unit.bench.test_evaluate import SHORT, reference_nats


def test_served_perplexity_is_that_of_transformers(float32_stack: RunningStack) -> None:
    expected = math.exp(reference_nats(context=1_024))
    scored = score_all(float32_stack.url, float32_stack.model(), start_token(TINY_MODEL), [SHORT], concurrency=1)
    (actual,) = asyncio.run(scored)
    assert compare([actual], [actual]).perplexity.value == pytest.approx(expected, rel=1e-4)
