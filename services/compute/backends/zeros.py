"""Large tensors of zeros. On CPUs the system fills their memory, so that no second pass has to."""

from __future__ import annotations

import errno
import math
import mmap
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from services.compute.backends.advice import POPULATE, advise

_LEAST = 1 << 21  # bytes of a mapping of its own, those of a huge page
_SHARE = 0.25  # an intake takes this part of a core's time


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
    if of_cpu := _mapped(tensors):
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(_touch, of_cpu))


class Intake:
    """Takes the memory of tensors of zeros later, a huge page at a time and for a quarter of a core's time.

    A page whose turn has not come is taken when it is first written to. No number changes. Before Linux 5.14, which
    cannot take memory without writing to it, all is taken at once.
    """

    def __init__(
        self,
        tensors: Iterable[Tensor] = (),
        clock: Callable[[], float] = time.perf_counter,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """Take the first page, so that a system that refuses is known. Raises OSError.

        `spent`: seconds that the thread has had a core.
        """
        self._tensors = _mapped(tensors)  # they keep their mappings
        self._clock, self._spent, self._due = clock, spent, 0.0
        # Requests use the lowest blocks first, so the beginnings of all tensors come before their ends.
        turns = zip_longest(*map(_pages, self._tensors))
        self._pages = deque(page for turn in turns for page in turn if page is not None)
        self.left = sum(map(len, self._pages))  # bytes
        if not self._pages:
            return
        try:
            self.take()
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            take_memory(self._tensors)
            self._pages.clear()
            self.left = 0

    @property
    def rest_s(self) -> float:
        """Seconds until the next page is due."""
        return max(0.0, self._due - self._clock())

    def take(self) -> None:
        """Take the next page. Raises OSError where the system has no memory for it."""
        began, page = self._spent(), self._pages.popleft()
        advise(page, POPULATE)
        self.left -= len(page)
        self._due = self._clock() + (self._spent() - began) * (1 / _SHARE - 1)


def _mapped(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that `zeros` has mapped."""
    return [tensor for tensor in tensors if tensor.device.type == "cpu" and tensor.nbytes >= _LEAST]


def _pages(tensor: Tensor) -> list[range]:
    """Return the addresses of a tensor by huge pages."""
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    bounds = [start, *range((start // _LEAST + 1) * _LEAST, end, _LEAST), end]
    return [range(first, last) for first, last in pairwise(bounds)]


def _touch(tensor: Tensor) -> None:
    tensor.view(-1).view(torch.uint8).numpy()[:: mmap.PAGESIZE] = 0
