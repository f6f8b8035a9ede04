"""Large tensors of zeros. On CPUs the system fills their memory, so that no second pass has to."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_LEAST = 1 << 21  # bytes of a mapping of its own, those of a huge page


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. A large one of a CPU takes its memory page by page, when a page is first touched."""
    n_bytes = math.prod(sizes) * dtype.itemsize
    if device.type != "cpu" or n_bytes < _LEAST:
        return torch.zeros(tuple(sizes), dtype=dtype, device=device)
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)  # accesses to blocks of a large cache are faster
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(tuple(sizes))


def take_memory(tensors: Iterable[Tensor]) -> None:
    """Take the memory of tensors of zeros now, on all cores: a byte of each page is written."""
    of_cpu = [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes >= _LEAST]
    if of_cpu:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(_touch, of_cpu))


def _touch(tensor: Tensor) -> None:
    tensor.view(-1).view(torch.uint8).numpy()[:: mmap.PAGESIZE] = 0
