"""Opens a compiled library of kernels and starts its threads."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from pathlib import Path

pointer, long, float_, int_ = ctypes.c_void_p, ctypes.c_long, ctypes.c_float, ctypes.c_int
Signatures = Mapping[str, tuple[type, ...]]  # arguments of functions that return nothing

_NO_THREADS = -2  # from rz_enable


def open_library(path: Path, signatures: Signatures, threads: int) -> ctypes.CDLL | None:
    """Load the library to run on `threads` threads; None: the operating system refuses the registers it needs.

    Raises RuntimeError when it is missing, or when there are no threads.
    """
    if not path.exists():
        raise RuntimeError(f"{path} is missing: run `make kernels`, or install again")
    library = ctypes.CDLL(str(path))
    library.rz_enable.argtypes, library.rz_enable.restype = (long,), int_
    result = library.rz_enable(threads)
    if result == _NO_THREADS:
        raise RuntimeError(f"the kernels cannot start {threads} threads")
    for name, arguments in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return None if result else library
