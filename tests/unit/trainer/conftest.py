from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.models import BUNDLED_MODEL
from trainer.config import ModelShape, Recipe, Stage
from trainer.evaluate import load_model
from trainer.model import Llama


@pytest.fixture(scope="session")
def bundled_folder() -> Path:
    return BUNDLED_MODEL


@pytest.fixture(scope="session")
def bundled() -> tuple[Llama, Tokenizer]:
    return load_model(BUNDLED_MODEL)


@pytest.fixture
def toy_shape() -> ModelShape:
    return ModelShape(
        hidden_size=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        head_dim=8,
        ffn_size=48,
        vocab_size=300,
        max_positions=64,
    )


@pytest.fixture
def toy_recipe() -> Recipe:
    return Recipe(
        seed=7,
        steps=8,
        batch_tokens=64,
        stages=(Stage(0.0, 16, chat=0.3), Stage(0.5, 32, chat=0.3)),
        mixture={"library": 1.0},
    )
