"""Biases of many requests at once against one row, and one token, at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from ryzanstein.v1.worker_pb2 import Sampling

from services.compute.sampling.bias import Biases

START, WIDTH = 16, 32  # this rank's columns; others' tokens are not its own
TOKEN = st.integers(0, 63)
PARAMS = st.builds(
    Sampling,
    logit_bias=st.dictionaries(TOKEN, st.sampled_from((-100.0, -0.5, 0.25, 4.0)), max_size=6),
    stop_token_ids=st.lists(TOKEN, max_size=3, unique=True).map(tuple),
)


@given(st.lists(st.tuples(PARAMS, st.booleans()), min_size=1, max_size=6))
def test_all_rows_at_once_equal_row_by_row(requests: list[tuple[Sampling, bool]]) -> None:
    biases = Biases(START, WIDTH)
    n = len(requests)
    logits = torch.arange(2 * n * WIDTH, dtype=torch.float32).reshape(2 * n, WIDTH)
    expected = logits.clone()
    for i, (params, early) in enumerate(requests):
        biases.admit(n - 1 - i, params)
        for token, bias in params.logit_bias.items():
            if START <= token < START + WIDTH:
                expected[2 * i, token - START] += bias
        for token in params.stop_token_ids:
            if early and START <= token < START + WIDTH:
                expected[2 * i, token - START] = -torch.inf

    biases.apply(logits, np.arange(0, 2 * n, 2), np.arange(n)[::-1], np.array([early for _, early in requests]))

    assert torch.equal(logits, expected)
