"""One checkpoint of each variant, written once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.unit.worker.model import zoo


@dataclass(frozen=True)
class Sample:
    folder: Path
    ids: list[int]
    logits: torch.Tensor  # [len(ids), vocab_size], transformers'


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sample]:
    made: dict[str, Sample] = {}

    def make(variant: str) -> Sample:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            model = zoo.write_checkpoint(zoo.VARIANTS[variant](), folder)
            ids = zoo.prompt()
            made[variant] = Sample(folder, ids, zoo.reference_logits(model, ids))
        return made[variant]

    return make
