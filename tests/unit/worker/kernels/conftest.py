"""The kernels on several threads. No AMX is the only reason to skip: where the CPU has it, nothing may be missing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from services.worker.kernels import tiles
from services.worker.kernels.tiles import TileKernels

OnThreads = Callable[[int], TileKernels]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def amx() -> None:
    if "amx_bf16" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this CPU has no AMX: amx_bf16 is not among its flags")


@pytest.fixture(scope="session")
def on_threads(amx: None, tmp_path_factory: pytest.TempPathFactory) -> OnThreads:
    """A pool never shrinks, so every number of threads gets a copy of the library with a pool of its own."""
    opened: dict[int, TileKernels] = {}

    def load(threads: int) -> TileKernels:
        if threads not in opened:
            copy = shutil.copy(tiles.LIBRARY, tmp_path_factory.mktemp("kernels") / f"on_{threads}.so")
            kernels = tiles.load_library(Path(copy), threads)
            assert kernels is not None
            opened[threads] = kernels
        return opened[threads]

    return load


@pytest.fixture(scope="session")
def kernels(on_threads: OnThreads) -> TileKernels:
    return on_threads(3)
