"""The kernels on several threads. A CPU that cannot run them is the only reason to skip."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from services.compute.cpu import has_amx, has_avx2, has_avx512, has_avx512_bf16, has_neon, has_neon_bf16
from services.compute.kernels import attention, bfloat16
from services.compute.kernels.bfloat16 import AMX, AVX2, AVX512, AVX512_BF16, NEON, NEON_BF16, Bfloat16Kernels

OnThreads = Callable[[int], Bfloat16Kernels]
Load = Callable[[str, int], Any]

LIBRARIES = {
    "amx": AMX,
    "avx512_bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": AVX2,
    "neon_bf16": NEON_BF16,
    "neon": NEON,
}
_RUNS = {
    AMX: (has_amx, "tile registers (AMX)"),
    AVX512_BF16: (has_avx512_bf16, "AVX-512 for bfloat16"),
    AVX512: (has_avx512, "AVX-512"),
    AVX2: (has_avx2, "AVX2"),
    NEON_BF16: (has_neon_bf16, "NEON bfloat16"),
    NEON: (has_neon, "NEON"),
}


def runs(library: Path) -> bool:
    """Whether the CPU can run it."""
    can, _ = _RUNS[library]
    return can()


def need(library: Path) -> None:
    """Skip where the CPU cannot run it."""
    if not runs(library):
        pytest.skip(f"this CPU has no {_RUNS[library][1]}")


@pytest.fixture(scope="session")
def amx() -> None:
    need(AMX)


@pytest.fixture(scope="session")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """The kernels of "amx", say, or the attention alone of "avx2:float32".

    On as many threads: a pool never shrinks, so every number gets a copy of the library with a pool of its own.
    """
    folder, opened = tmp_path_factory.mktemp("kernels"), dict[tuple[str, int], Any]()

    def load(what: str, threads: int) -> Any:
        name, _, dtype = what.partition(":")
        library = LIBRARIES[name]
        need(library)
        if (what, threads) not in opened:
            copy = Path(shutil.copy(library, folder / f"{library.stem}_{dtype}_on_{threads}.so"))
            if dtype:
                opened[what, threads] = attention.load_library(copy, threads, getattr(torch, dtype))
            else:
                opened[what, threads] = bfloat16.load_library(copy, threads)
            assert opened[what, threads] is not None
        return opened[what, threads]

    return load


@pytest.fixture(scope="session", params=LIBRARIES)
def on_threads(request: pytest.FixtureRequest, load: Load) -> OnThreads:
    load(request.param, 1)
    return functools.partial(load, request.param)


@pytest.fixture(scope="session")
def kernels(on_threads: OnThreads) -> Bfloat16Kernels:
    return on_threads(3)
