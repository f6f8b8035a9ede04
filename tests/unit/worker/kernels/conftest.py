"""The kernels on several threads. A CPU that cannot run them is the only reason to skip."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.cpu import has_tiles, has_vectors
from services.worker.kernels import tiles, vectors
from services.worker.kernels.tiles import TileKernels
from services.worker.kernels.vectors import VectorKernels

OnThreads = Callable[[int], TileKernels]
Load = Callable[[str, int], TileKernels | VectorKernels]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def _need(library: str) -> None:
    if not (has_tiles() if library == "tiles" else has_vectors()):
        pytest.skip(f"this CPU has no {'tile registers (AMX)' if library == 'tiles' else 'AVX2'}")


@pytest.fixture(scope="session")
def amx() -> None:
    _need("tiles")


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """A pool never shrinks, so every number of threads gets a copy of the library with a pool of its own."""
    opened: dict[tuple[str, int], TileKernels | VectorKernels] = {}

    def load(library: str, threads: int) -> TileKernels | VectorKernels:
        _need(library)
        if (library, threads) not in opened:
            module = tiles if library == "tiles" else vectors
            copy = shutil.copy(module.LIBRARY, tmp_path_factory.mktemp("kernels") / f"{library}_on_{threads}.so")
            kernels = module.load_library(Path(copy), threads)
            assert kernels is not None
            opened[library, threads] = kernels
        return opened[library, threads]

    return load


@pytest.fixture(scope="session")
def on_threads(load: Load) -> OnThreads:
    def load_tiles(threads: int) -> TileKernels:
        kernels = load("tiles", threads)
        assert isinstance(kernels, TileKernels)
        return kernels

    return load_tiles


@pytest.fixture(scope="session")
def kernels(amx: None, on_threads: OnThreads) -> TileKernels:
    return on_threads(3)
