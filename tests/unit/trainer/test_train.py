from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from trainer.config import ModelShape, Recipe
from trainer.dataset import Dataset
from trainer.optim import learning_rate_scale, orthogonalise
from trainer.train import Machine, Progress, Saving, Trainer

CPU = Machine(torch.device("cpu"), mixed_precision=False, micro_tokens=32)


@pytest.fixture
def dataset() -> Dataset:
    rng = np.random.default_rng(0)
    # Two alternating tokens are easy to learn; the noise keeps the loss from reaching zero.
    pattern = np.tile(np.array([5, 9], dtype=np.uint16), 500)
    noise = rng.integers(0, 300, 1_000).astype(np.uint16)
    return Dataset({"library": np.where(rng.random(1_000) < 0.9, pattern, noise), "chat": noise})


def train(
    shape: ModelShape, recipe: Recipe, dataset: Dataset, folder: Path, stop_at: int | None = None
) -> tuple[Trainer, list[Progress]]:
    seen: list[Progress] = []
    trainer = Trainer(shape, recipe, dataset, CPU, Saving(folder / "c.pt", folder / "log.jsonl", every=100))
    trainer.run(seen.append, lambda: None, stop_at)
    return trainer, seen


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_a_resumed_run_equals_one_that_never_stopped(
    toy_shape: ModelShape, toy_recipe: Recipe, dataset: Dataset, tmp_path: Path, stop_at: int
) -> None:
    whole, steps = train(toy_shape, toy_recipe, dataset, tmp_path / "whole")
    train(toy_shape, toy_recipe, dataset, tmp_path / "halves", stop_at)
    resumed, rest = train(toy_shape, toy_recipe, dataset, tmp_path / "halves")

    assert [step.step for step in rest] == list(range(stop_at + 1, 9))
    assert [step.loss for step in rest] == [step.loss for step in steps[stop_at:]]
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name
    for ours, theirs in zip(whole.optimisers, resumed.optimisers, strict=True):
        assert_equal_state(ours.state_dict()["state"], theirs.state_dict()["state"])


def assert_equal_state(left: dict[int, dict[str, torch.Tensor]], right: dict[int, dict[str, torch.Tensor]]) -> None:
    assert left.keys() == right.keys()
    for index, state in left.items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(right[index][name])), name


def test_a_resumed_log_has_every_step_once(
    toy_shape: ModelShape, toy_recipe: Recipe, dataset: Dataset, tmp_path: Path
) -> None:
    train(toy_shape, toy_recipe, dataset, tmp_path, stop_at=3)
    log = tmp_path / "log.jsonl"
    # What a run leaves that died after step 4, before its next checkpoint.
    log.write_text(log.read_text() + log.read_text().splitlines()[-1].replace('"step": 3', '"step": 4') + "\n")
    train(toy_shape, toy_recipe, dataset, tmp_path)
    assert [line.split(",")[0] for line in log.read_text().splitlines()] == [f'{{"step": {n}' for n in range(1, 9)]


def test_training_learns(toy_shape: ModelShape, toy_recipe: Recipe, dataset: Dataset, tmp_path: Path) -> None:
    _, steps = train(toy_shape, replace(toy_recipe, steps=60), dataset, tmp_path)
    assert steps[0].loss > 5.5  # ln 300 = 5.7
    assert steps[-1].loss < steps[0].loss - 1.0


def test_context_grows_with_progress(
    toy_shape: ModelShape, toy_recipe: Recipe, dataset: Dataset, tmp_path: Path
) -> None:
    _, steps = train(toy_shape, toy_recipe, dataset, tmp_path)
    assert [step.context for step in steps] == [16] * 4 + [32] * 4
    assert steps[-1].tokens == 8 * 64


def test_a_deadline_ends_the_run_before_its_steps(
    toy_shape: ModelShape, toy_recipe: Recipe, dataset: Dataset, tmp_path: Path
) -> None:
    recipe = replace(toy_recipe, steps=100_000, minutes=0.5 / 60)
    _, steps = train(toy_shape, recipe, dataset, tmp_path)
    assert steps[-1].fraction == 1.0
    assert steps[-1].seconds >= 0.5
    assert steps[-1].step < 100_000


def test_batches_depend_on_seed_and_step_alone(dataset: Dataset) -> None:
    shares = {"library": 0.5, "chat": 0.5}
    first = dataset.batch(1, 10, shares, rows=4, length=16)
    assert first.shape == (4, 17)
    assert torch.equal(first, dataset.batch(1, 10, shares, rows=4, length=16))
    assert not torch.equal(first, dataset.batch(1, 11, shares, rows=4, length=16))
    assert not torch.equal(first, dataset.batch(2, 10, shares, rows=4, length=16))


def test_learning_rate_warms_up_holds_and_reaches_zero() -> None:
    scales = [learning_rate_scale(progress, warmup=0.1, decay=0.5) for progress in (0, 0.05, 0.1, 0.5, 0.75, 1, 1.2)]
    assert scales == pytest.approx([0, 0.5, 1, 1, 0.5, 0, 0])


@pytest.mark.parametrize("size", [(16, 16), (48, 16), (16, 48)])
def test_orthogonalise_brings_singular_values_near_one(size: tuple[int, int]) -> None:
    matrix = torch.randn(size, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrix).float())
    # The quintic is tuned for speed: it lands between about 0.5 and 1.3 rather than on 1.
    assert values.min() > 0.3
    assert values.max() < 1.4
