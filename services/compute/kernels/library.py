"""Opens a compiled library of kernels and starts its threads; calls attention."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from services.compute.kernels.signatures import fingerprint, read_functions

_TYPES = {
    **dict.fromkeys(("long", "row_count", "sequence_count"), ctypes.c_long),
    "pointer": ctypes.c_void_p,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "void": None,
}
FUNCTIONS = read_functions()

# n_kv_heads, group, head_dim, block_tokens, scale, softcap (0: none), window (0: none)
AttentionShape = tuple[int, int, int, int, float, float, int]
# row starts [n + 1], context lengths [n], block tables [n, n_blocks] or by KV head [n, n_kv_heads, n_blocks], all int64
Sequences = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_NO_THREADS = -2  # result of rz_enable


class RegistersRefusedError(RuntimeError):
    """The operating system does not let this process use the registers that a library needs."""

    def __init__(self) -> None:
        super().__init__("the operating system refuses the tile registers")


def open_library(path: Path, threads: int) -> ctypes.CDLL:
    """Load a library, declare its functions as in `source/kernels.h`, and start `threads` threads.

    Raises RegistersRefusedError, and RuntimeError when the library is missing or compiled from other sources, or when
    the threads cannot be started.
    """
    if not path.exists():
        raise RuntimeError(f"{path} is missing: run `make kernels`, or install again")
    library = ctypes.CDLL(str(path))
    if _fingerprint(library) != fingerprint(FUNCTIONS):
        raise RuntimeError(f"{path} was compiled from other sources: run `make kernels`, or install again")
    for function in FUNCTIONS:
        if hasattr(library, function.name):  # some functions exist only for some kinds of CPU
            declared = getattr(library, function.name)
            declared.argtypes, declared.restype = [_TYPES[kind] for kind in function.kinds], _TYPES[function.result]
    result = library.rz_enable(threads)
    if result == _NO_THREADS:
        raise RuntimeError(f"the kernels cannot start {threads} threads")
    if result:
        raise RegistersRefusedError
    return library


def _fingerprint(library: ctypes.CDLL) -> str:
    if not hasattr(library, "rz_fingerprint"):
        return ""
    return (ctypes.c_char * 16).in_dll(library, "rz_fingerprint").value.decode()


def call_attention(
    function: Callable[..., None],
    q: torch.Tensor,
    out: torch.Tensor,
    cache: torch.Tensor,
    shape: AttentionShape,
    sequences: Sequences,
) -> None:
    """Attend with `q` [n, heads * head_dim] over a layer's cache; `function` has rz_attend's signature."""
    starts, lengths, blocks = sequences
    function(
        *(q.data_ptr(), q.stride(0), out.data_ptr(), out.stride(0), cache.data_ptr()),
        *shape,
        *(starts.data_ptr(), lengths.data_ptr(), blocks.data_ptr(), blocks.shape[-1]),
        *(blocks.shape[1] if blocks.dim() == 3 else 1, blocks.shape[0]),
    )
