"""Our attention kernels for AVX registers, by themselves: for float32, and for bfloat16 where AMX does not serve.

A row's bits depend on that row alone, whatever the number of rows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from services.worker.cpu import has_avx2, has_avx512, has_avx512_bf16
from services.worker.kernels.bfloat16 import AVX2, AVX512, AVX512_BF16, HEAD_MULTIPLE, MAX_HEAD_DIM
from services.worker.kernels.library import ATTENTION, AttentionShape, Sequences, call_attention, open_library

_FUNCTIONS = {torch.bfloat16: "rz_attend", torch.float32: "rz_attend_float"}


class AvxAttention:
    """The compiled kernel for one dtype, called with tensors."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._attend = getattr(library, _FUNCTIONS[dtype])

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, shape: AttentionShape, sequences: Sequences
    ) -> None:
        """Attend with `q` [n, heads * head_dim] over a layer's cache."""
        call_attention(self._attend, q, out, cache, shape, sequences)


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel applies, on this CPU."""
    return dtype in _FUNCTIONS and head_dim % HEAD_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM and has_avx2()


def open_attention(dtype: torch.dtype) -> AvxAttention:
    """Open the kernel where it applies. Raises RuntimeError when it is missing, or when there are no threads."""
    library = AVX512_BF16 if dtype is torch.bfloat16 and has_avx512_bf16() else AVX512 if has_avx512() else AVX2
    return load_library(library, torch.get_num_threads(), dtype)


def load_library(path: Path, threads: int, dtype: torch.dtype) -> AvxAttention:
    """Load the kernel to run on `threads` threads. Raises RuntimeError like `open_attention`."""
    return AvxAttention(open_library(path, {_FUNCTIONS[dtype]: ATTENTION}, threads), dtype)
