"""Our attention kernels for vector registers: for float32, and for bfloat16 where the AMX kernels do not apply.

A row's result does not depend on the other rows, bit for bit.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from services.compute.cpu import has_vectors
from services.compute.kernels.bfloat16 import HEAD_MULTIPLE, MAX_HEAD_DIM, vector_library
from services.compute.kernels.library import AttentionShape, Sequences, call_attention, open_library

_FUNCTIONS = {torch.bfloat16: "rz_attend", torch.float32: "rz_attend_float"}
_OVER_INT8 = {torch.bfloat16: "rz_attend_int8", torch.float32: "rz_attend_int8_float"}


class VectorAttention:
    """The compiled kernel for one dtype, called with tensors."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype) -> None:
        self._attend = getattr(library, _FUNCTIONS[dtype])
        self._attend_int8 = getattr(library, _OVER_INT8[dtype])

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, shape: AttentionShape, sequences: Sequences
    ) -> None:
        """Attend with `q` [n, heads * head_dim] over a layer's cache; in int8 if `cache` is."""
        attend = self._attend_int8 if cache.dtype is torch.int8 else self._attend
        call_attention(attend, q, out, cache, shape, sequences)


def serves(dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the kernel applies on this CPU."""
    return dtype in _FUNCTIONS and head_dim % HEAD_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM and has_vectors()


def open_attention(dtype: torch.dtype) -> VectorAttention:
    """Open the kernel. Raises RuntimeError when its library is missing or its threads cannot be started."""
    return load_library(vector_library(pairs=dtype is torch.bfloat16), torch.get_num_threads(), dtype)


def load_library(path: Path, threads: int, dtype: torch.dtype) -> VectorAttention:
    """Load the kernel to run on `threads` threads. Raises RuntimeError like `open_attention`."""
    return VectorAttention(open_library(path, threads), dtype)
