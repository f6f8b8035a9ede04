"""The bundled model's card names the numbers that are measured."""

from __future__ import annotations

import json

from tests.models import BUNDLED_MODEL


def test_card_names_the_stored_metrics() -> None:
    metrics = json.loads((BUNDLED_MODEL / "metrics.json").read_text(encoding="utf-8"))
    card = (BUNDLED_MODEL / "README.md").read_text(encoding="utf-8")
    for score in metrics["held_out"].values():
        assert f"| {score['bits_per_byte']:.3f} | {score['perplexity']:.2f} | {score['tokens']:,} |" in card
