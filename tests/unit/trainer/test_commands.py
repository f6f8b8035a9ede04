"""The trainer's commands on a library of a few files: train, go on, evaluate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from trainer.__main__ import app
from trainer.config import ModelShape, Recipe


@pytest.fixture
def folder(
    library: Path, toy_shape: ModelShape, toy_recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where the model will be; a toy of one is trained."""
    monkeypatch.setattr("trainer.prepare.library_root", lambda: library)
    monkeypatch.setattr("trainer.chat.BASICS_REPEATS", 1)
    monkeypatch.setattr("trainer.__main__.ModelShape", lambda: replace(toy_shape, max_positions=512))
    monkeypatch.setattr("trainer.__main__.Recipe", lambda: toy_recipe)
    return tmp_path / "model"


def trainer(*arguments: str) -> Result:
    done = CliRunner().invoke(app, [*arguments, "--threads", "1"])
    assert done.exit_code == 0, done.output
    return done


def test_a_run_goes_on_from_its_checkpoint_and_its_model_is_measured(folder: Path) -> None:
    out = ("--out", str(folder))
    shown = trainer("train", *out, "--steps", "2", "--device", "cpu").output
    assert "training" in shown
    assert "100%" in shown
    held_out = [json.loads(line) for line in (folder / "heldout.jsonl").read_text().splitlines()]
    assert {document["group"] for document in held_out} == {"library", "documentation"}
    before = load_file(folder / "model.safetensors")
    first = (folder / "training" / "log.jsonl").read_text()
    tokens = (folder / "training" / "tokens.npz").stat().st_mtime_ns
    trainer("train", *out, "--steps", "3", "--device", "cpu")
    assert (folder / "training" / "tokens.npz").stat().st_mtime_ns == tokens, "made once"
    log = (folder / "training" / "log.jsonl").read_text()
    assert log.startswith(first)
    assert [json.loads(line)["step"] for line in log.splitlines()] == [1, 2, 3]
    after = load_file(folder / "model.safetensors")
    assert any((after[name] != weight).any() for name, weight in before.items())

    table = trainer("evaluate", *out).output
    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics["held_out"]) == {"all", "library", "documentation"}
    assert metrics["held_out"]["all"]["tokens"] == sum(
        metrics["held_out"][group]["tokens"] for group in ("library", "documentation")
    )
    assert metrics["training"]["steps"] == 3
    assert f"{metrics['held_out']['all']['bits_per_byte']:.3f}" in table
    assert "3 steps of 64 tokens" in (folder / "README.md").read_text()
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
