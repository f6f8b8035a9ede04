"""Copies between the host and a GPU from pinned memory, which the driver reads and writes without the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from services.worker.backends.transfers import Ints

_BUFFERS = 4  # uploads in turn, so that none waits for the one before
_ALIGN = 2  # words: Triton compiles a kernel again for a tensor that does not begin at a multiple of 16 bytes


@dataclass(slots=True)
class _Buffer:
    words: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    read: torch.cuda.Event = field(default_factory=torch.cuda.Event)


@dataclass(frozen=True, slots=True)
class PinnedNumbers:
    """Numbers that arrive in pinned memory."""

    numbers: Tensor  # [n] int64
    copied: torch.cuda.Event

    def arrived(self) -> bool:
        """Whether the copy has ended."""
        return bool(self.copied.query())  # type: ignore[no-untyped-call]

    def values(self) -> Ints:
        """Wait for the numbers."""
        self.copied.synchronize()
        found: Ints = self.numbers.numpy()
        return found


class PinnedTransfers:
    """All arrays of an upload go by one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn = device, 0
        self._buffers: list[_Buffer] = []  # made at the first uploads: a backend may be opened where no GPU is

    def up(self, arrays: Sequence[Ints]) -> list[Tensor]:
        """Return the arrays on the device; each begins at a multiple of 16 bytes."""
        sizes = [-(-array.size // _ALIGN) * _ALIGN for array in arrays]
        total = sum(sizes)
        if len(self._buffers) < _BUFFERS:
            self._buffers.append(_Buffer())
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer.read.synchronize()
        if len(buffer.words) < total:
            buffer.words = torch.empty(2 * total, dtype=torch.int64, pin_memory=True)
        words, start = buffer.words.numpy(), 0
        for array, size in zip(arrays, sizes, strict=True):
            words[start : start + array.size] = np.ravel(array)
            start += size
        uploaded = buffer.words[:total].to(self._device, non_blocking=True)
        buffer.read.record()
        parts = torch.split(uploaded, sizes)
        return [part[: array.size].view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def down(self, numbers: Tensor) -> PinnedNumbers:
        """Begin to copy `numbers` [n] to the host."""
        found = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)  # torch keeps freed pinned memory
        found.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return PinnedNumbers(found, copied)
