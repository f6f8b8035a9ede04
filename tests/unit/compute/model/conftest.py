"""One checkpoint of each variant, written once for all tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from services.compute.backends.base import ModelBackend
from services.compute.backends.opening import open_backend
from services.compute.backends.torch.backend import TorchBackend
from tests.unit.compute.backends.tape import CUDA, on_gpu
from tests.unit.compute.model import zoo
from tests.unit.compute.model.harness import CPU


@dataclass(frozen=True)
class Sample:
    folder: Path
    ids: list[int]
    logits: torch.Tensor  # [len(ids), vocab_size], transformers'


# Every backend that this machine has, in float32.
BACKENDS: dict[str, Callable[[], ModelBackend]] = {
    "torch": lambda: TorchBackend(torch.float32, CPU),
    "cpu": lambda: open_backend(torch.float32, CPU),
}
if torch.cuda.is_available():
    BACKENDS["cuda"] = lambda: open_backend(torch.float32, CUDA)


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> ModelBackend:
    return BACKENDS[request.param]()


@pytest.fixture(params=[pytest.param(dtype, marks=on_gpu) for dtype in (torch.bfloat16, torch.float16)], ids=str)
def half(request: pytest.FixtureRequest) -> ModelBackend:
    """A GPU in half precision; of CPUs see test_invariance.py."""
    return open_backend(request.param, CUDA)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Sample]:
    made: dict[str, Sample] = {}

    def make(variant: str) -> Sample:
        if variant not in made:
            folder = tmp_path_factory.mktemp(variant)
            model = zoo.write_variant(variant, folder)
            ids = zoo.prompt()
            made[variant] = Sample(folder, ids, zoo.reference_logits(model, ids))
        return made[variant]

    return make
