"""Our attention kernel for CPUs with AVX2, by itself: for float32, and for bfloat16 where torch serves all else.

A row's bits depend on that row alone, whatever the number of rows.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from services.worker.cpu import has_vectors
from services.worker.kernels.bfloat16 import VECTORS
from services.worker.kernels.library import float_, long, open_library, pointer

HEAD_MULTIPLE, MAX_HEAD_DIM = 8, 256  # of head_dim
_ARGUMENTS = (
    *(pointer, long, pointer, long, pointer),
    *(long, long, long, long, float_, float_, long),
    *(pointer, pointer, pointer, long, long),
)
_SIGNATURES = {"rz_attend": _ARGUMENTS, "rz_attend_float": _ARGUMENTS}


class VectorAttention:
    """The compiled kernel, called with tensors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def attend(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        cache: torch.Tensor,
        shape: tuple[int, int, int, int, float, float, int],
        sequences: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> None:
        """Attend with `q` [n, heads * head_dim] over a layer's cache, all float32 or all bfloat16.

        `shape`: n_kv_heads, group, head_dim, block_size, scale, softcap (0: none), window (0: none).
        `sequences`: row starts [n + 1], context lengths [n], block tables [n, n_blocks], all int64.
        """
        starts, lengths, blocks = sequences
        function = self._library.rz_attend if q.dtype is torch.bfloat16 else self._library.rz_attend_float
        function(
            *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), cache.data_ptr()),
            *shape,
            *(starts.data_ptr(), lengths.data_ptr(), blocks.data_ptr(), blocks.shape[1], blocks.shape[0]),
        )


def open_attention(dtype: torch.dtype, device: torch.device, head_dim: int) -> VectorAttention | None:
    """Return the kernel, or None where it does not apply.

    Raises RuntimeError when this machine should have it and it is missing, or when there are no threads.
    """
    fits = head_dim % HEAD_MULTIPLE == 0 and head_dim <= MAX_HEAD_DIM
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or not fits or not has_vectors():
        return None
    return load_library(VECTORS, torch.get_num_threads())


def load_library(path: Path, threads: int) -> VectorAttention | None:
    """Load the kernel to run on `threads` threads; None: the operating system refuses.

    Raises RuntimeError when it is missing, or when there are no threads.
    """
    library = open_library(path, _SIGNATURES, threads)
    return None if library is None else VectorAttention(library)
