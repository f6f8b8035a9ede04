from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

from trainer.__main__ import choose_device
from trainer.card import draw_loss, fenced, render_card
from trainer.config import ModelShape, Recipe
from trainer.evaluate import Score, summarise_log

METRICS = {
    "training": {"steps": 1200, "tokens": 9_830_400, "minutes": 70.0, "tokens_per_second": 2340},
    "held_out": {"all": {"bits_per_byte": 1.25, "perplexity": 20.5, "tokens": 1000, "bytes": 3000}},
    "completions": [{"prompt": "def f(\n", "completion": "x):"}],
    "answers": [{"prompt": "Hi", "completion": "```python\npass\n```"}],
}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    records = [{"step": n, "loss": 8 / n, "tokens": n * 1e6, "seconds": n * 2.0} for n in range(1, 101)]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_card_shows_the_run_and_leaves_no_field_open() -> None:
    card = render_card(ModelShape(), Recipe(), METRICS)
    assert "{{" not in card
    assert "| all | 1.250 | 20.50 | 1,000 |" in card
    assert "1,200 steps of 8,192 tokens, 9.8 M in all" in card
    assert "7.47 M" in card


def test_a_fence_outlasts_the_fence_inside_it() -> None:
    assert fenced("```python\npass\n```").startswith("````text\n```python")


def test_loss_curve_is_a_png(log: Path, tmp_path: Path) -> None:
    draw_loss(log, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_log_summary_is_the_last_step_and_the_mean_of_the_tail(log: Path) -> None:
    summary = summarise_log(log)
    assert summary["steps"] == 100
    assert summary["tokens_per_second"] == 500_000
    assert summary["final_loss"] == pytest.approx(sum(8 / n for n in range(51, 101)) / 50, abs=1e-4)


def test_scores_add_up_and_convert_to_bits() -> None:
    # One nat a token, four bytes a token: 1 / ln 2 / 4 bits a byte.
    score = Score(10.0, 10, 40) + Score(20.0, 20, 80)
    assert score.bits_per_byte == pytest.approx(0.36067, abs=1e-5)
    assert score.perplexity == pytest.approx(2.71828, abs=1e-5)


def test_shares_of_every_stage_sum_to_one() -> None:
    recipe = Recipe()
    for stage in recipe.stages:
        assert sum(recipe.shares_in(stage).values()) == pytest.approx(1.0)


def test_unknown_device_is_refused_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    with pytest.raises(typer.BadParameter, match="auto, cpu or cuda"):
        choose_device("tpu")


def test_cuda_is_refused_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(typer.BadParameter, match="no usable CUDA device"):
        choose_device("cuda")
