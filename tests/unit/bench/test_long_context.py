"""The table of what narrowed attention costs in quality."""

from __future__ import annotations

import math

import torch

from bench.long_context import Quality, table
from services.common.attention import DENSE, AttentionMode


def test_cost_of_a_mode_has_the_standard_error_of_its_differences() -> None:
    """Tokens differ far more from each other than a mode differs from dense attention."""
    dense = Quality(8192, DENSE, torch.tensor([0.0, 2.0, 6.0, 0.0]), 3, 10)
    differences = torch.tensor([0.03, 0.01, 0.03, 0.01])
    narrow = Quality(8192, AttentionMode(pages=128), dense.losses + differences, 2, 10)
    error = 0.01 * math.sqrt(4 / 3) / 2
    assert narrow.cost(dense) == f"{100 * math.expm1(0.02):+.1f} ± {100 * error:.1f} %" == "+2.0 ± 0.6 %"
    assert table([dense, narrow]).splitlines()[2:] == [
        "| `dense` | 7.389 | 3 of 10 |",
        "| `top_k(128)` | 7.538 (+2.0 ± 0.6 %) | 2 of 10 |",
    ]
