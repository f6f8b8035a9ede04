"""The threads behind the kernels: every piece of work is done once, however many callers ask at once."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.unit.compute.kernels.conftest import LIBRARIES, OnThreads, runs
from tests.unit.compute.kernels.numbers import normal
from tests.unit.compute.kernels.test_attention import KernelCase, attend, lay_out

ROUNDS = 500


@pytest.mark.parametrize("threads", [1, 2, 3, 10])
def test_thousands_of_rounds_in_a_row(on_threads: OnThreads, threads: int) -> None:
    """Small ones follow each other while helpers still look out, and sizes change from round to round."""
    kernels = on_threads(threads)
    x, spare = normal(0, 1, 32), kernels.spare(32)
    packed, expected = {}, {}
    for n_out in (1, 64, 65, 200, 1000):
        weight = normal(n_out, n_out, 32)
        packed[n_out] = kernels.pack(weight)
        expected[n_out] = torch.empty(1, n_out, dtype=torch.float32)
        on_threads(1).linear(x, packed[n_out], None, expected[n_out], spare)
    for index in range(ROUNDS):
        n_out = (1000, 1, 65, 200, 64)[index % 5]
        out = torch.full((1, n_out), torch.nan)
        kernels.linear(x, packed[n_out], None, out, spare)
        assert torch.equal(out, expected[n_out]), (index, n_out)


def test_callers_at_once(on_threads: OnThreads) -> None:
    """One has the pool, the others work alone meanwhile; no caller gets another's result."""
    kernels, case = on_threads(3), KernelCase(((1, 40), (5, 70)), n_kv=3, group=2)
    weight, data = normal(1, 700, 64), lay_out(case, torch.bfloat16)
    packed, attended = kernels.pack(weight), attend(on_threads(1), case, data)

    def call(caller: int) -> None:
        x, spare = normal(caller, 1 + caller * 7, 64), kernels.spare(64)
        expected, out = torch.empty(len(x), 700), torch.empty(len(x), 700)
        on_threads(1).linear(x, packed, None, expected, spare)
        for index in range(30):
            out.fill_(torch.nan)
            kernels.linear(x, packed, None, out, spare)
            assert torch.equal(out, expected), (caller, index)
            assert torch.equal(attend(kernels, case, data), attended), (caller, index)

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(call, range(8)))


_IDLE = """
import sys, time
from pathlib import Path
import torch
from services.compute.kernels.bfloat16 import load_library
for library in map(Path, sys.argv[1:]):
    before = set(Path("/proc/self/task").iterdir())
    kernels = load_library(library, 3)
    helpers = set(Path("/proc/self/task").iterdir()) - before
    assert len(helpers) == 2, (library, helpers)
    x, packed = torch.ones(20, 32).bfloat16(), kernels.pack(torch.ones(500, 32).bfloat16())
    for _ in range(20):
        while any("State:\\tS" not in (helper / "status").read_text() for helper in helpers):
            time.sleep(0.001)
        out = torch.zeros(20, 500)
        kernels.linear(x, packed, None, out, kernels.spare(32))
        assert (out == 32).all(), library
"""


def test_idle_helpers_sleep() -> None:
    """A thread that only waits takes the core from its neighbours. Tests all libraries in one process."""
    libraries = [library for library in LIBRARIES.values() if runs(library)]
    program = [sys.executable, "-c", _IDLE, *map(str, libraries)]
    done = subprocess.run(program, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
