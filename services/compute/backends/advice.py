"""Advice to the system about ranges of this process's memory (madvise(2))."""

from __future__ import annotations

import ctypes
import mmap
import os

UNNEEDED = mmap.MADV_DONTNEED  # the range's memory is given back
POPULATE = 23  # MADV_POPULATE_WRITE of linux/mman.h, since Linux 5.14: the range takes its memory, its bytes stay
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def advise(span: range, advice: int) -> None:
    """Give advice about the addresses `span`, which begin with a page. Raises OSError; EINVAL: it is not known."""
    if _libc.madvise(span.start, len(span), advice):
        raise OSError(ctypes.get_errno(), f"madvise: {os.strerror(ctypes.get_errno())}")
