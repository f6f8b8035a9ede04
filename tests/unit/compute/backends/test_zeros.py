"""Tensors of zeros, and when they take memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.compute.backends.zeros import take_memory, zeros

CPU = torch.device("cpu")
MIB = 1 << 20


def own_bytes() -> int:
    """Memory that only this process has."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("RssAnon:"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("n", [7, 3 * MIB + 5])
def test_all_numbers_are_zero_and_can_be_written(dtype: torch.dtype, n: int) -> None:
    tensor = zeros((3, n), dtype, CPU)
    take_memory([tensor])
    assert (tensor.shape, tensor.dtype) == ((3, n), dtype)
    assert not tensor.view(torch.int8).any()
    tensor[1] = 1
    assert bool((tensor[1].float() == 1).all())
    assert not tensor[::2].view(torch.int8).any()


def test_memory_is_taken_on_request_and_given_back_with_the_tensor() -> None:
    before = own_bytes()
    tensors = [zeros((32, MIB), torch.int8, CPU) for _ in range(8)]
    assert own_bytes() - before < 64 * MIB
    take_memory(tensors)
    assert own_bytes() - before > 240 * MIB
    tensors.clear()
    assert own_bytes() - before < 64 * MIB
