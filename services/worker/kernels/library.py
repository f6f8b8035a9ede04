"""Opens a compiled library of kernels and starts its threads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

pointer, long, float_, int_ = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
Signatures = Mapping[str, tuple[type, ...]]  # arguments of functions that return nothing

# n_kv_heads, group, head_dim, block_size, scale, softcap (0: none), window (0: none)
AttentionShape = tuple[int, int, int, int, float, float, int]
# row starts [n + 1], context lengths [n], block tables [n, n_blocks], all int64
Sequences = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ATTENTION = (
    *(pointer, long, pointer, long, pointer),
    *(long, long, long, long, float_, float_, long),
    *(pointer, pointer, pointer, long, long),
)

_NO_THREADS = -2  # from rz_enable


class RegistersRefusedError(RuntimeError):
    """The operating system refuses a process the registers that a library needs."""

    def __init__(self) -> None:
        super().__init__("the operating system refuses the tile registers")


def open_library(path: Path, signatures: Signatures, threads: int) -> ctypes.CDLL:
    """Load the library to run on `threads` threads.

    Raises RegistersRefusedError, and RuntimeError when it is missing, or when there are no threads.
    """
    if not path.exists():
        raise RuntimeError(f"{path} is missing: run `make kernels`, or install again")
    library = ctypes.CDLL(str(path))
    library.rz_enable.argtypes, library.rz_enable.restype = (long,), int_
    result = library.rz_enable(threads)
    if result == _NO_THREADS:
        raise RuntimeError(f"the kernels cannot start {threads} threads")
    if result:
        raise RegistersRefusedError
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def call_attention(
    function: Callable[..., None],
    q: torch.Tensor,
    out: torch.Tensor,
    cache: torch.Tensor,
    shape: AttentionShape,
    sequences: Sequences,
) -> None:
    """Attend with `q` [n, heads * head_dim] over a layer's cache, by a `function` with the arguments `ATTENTION`."""
    starts, lengths, blocks = sequences
    function(
        *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), cache.data_ptr()),
        *shape,
        *(starts.data_ptr(), lengths.data_ptr(), blocks.data_ptr(), blocks.shape[1], blocks.shape[0]),
    )
