from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.models import BUNDLED_MODEL
from trainer.config import ModelShape, Recipe, Stage
from trainer.evaluate import load_model
from trainer.model import Llama

MODULE = '''"""What module {n} is for."""


def double(x):
    """Return twice x{n}."""
    return x * 2


class Box{n}:
    """Holds a thing of kind {n}."""
'''


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


@pytest.fixture
def library(tmp_path: Path) -> Path:
    for n in range(200):
        (tmp_path / f"mod{n}.py").write_text(MODULE.format(n=n))
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "test_a.py").write_text("assert True\n")
    (tmp_path / "copy.py").write_text(MODULE.format(n=0))
    (tmp_path / "latin.py").write_bytes(b"# \xe9\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "other.py").write_text("x = 1\n")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'with': 'Title\\n\\nThe with statement.'}\n")
    return tmp_path
