"""Our attention kernel for CPUs with AVX2, by itself: for float32, and for bfloat16 where tiles do not serve.

A row's bits depend on that row alone, whatever the number of rows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from services.worker.cpu import has_pairs, has_vectors
from services.worker.kernels.bfloat16 import PAIRS, VECTORS
from services.worker.kernels.library import ATTENTION, AttentionShape, Sequences, call_attention, open_library

HEAD_MULTIPLE, MAX_HEAD_DIM = 8, 256  # of head_dim
_SIGNATURES = {"rz_attend": ATTENTION, "rz_attend_float": ATTENTION}


class VectorAttention:
    """The compiled kernel, called with tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def attend(
        self, q: torch.Tensor, out: torch.Tensor, cache: torch.Tensor, shape: AttentionShape, sequences: Sequences
    ) -> None:
        """Attend with `q` [n, heads * head_dim] over a layer's cache, all float32 or all bfloat16."""
        function = self._library.rz_attend if q.dtype is torch.bfloat16 else self._library.rz_attend_float
        call_attention(function, q, out, cache, shape, sequences)


def open_attention(dtype: torch.dtype, device: torch.device, head_dim: int) -> VectorAttention | None:
    """Return the kernel, or None where it does not apply.

    Raises RuntimeError when this machine should have it and it is missing, or when there are no threads.
    """
    fits = head_dim % HEAD_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not fits or not has_vectors():
        return None
    # The library that multiplies there, too: a second one would have threads of its own.
    return load_library(PAIRS if has_pairs() else VECTORS, torch.get_num_threads())


def load_library(path: Path, threads: int) -> VectorAttention | None:
    """Load the kernel to run on `threads` threads; None: the operating system refuses.

    Raises RuntimeError when it is missing, or when there are no threads.
    """
    library = open_library(path, _SIGNATURES, threads)
    return None if library is None else VectorAttention(library)
