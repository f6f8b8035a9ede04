"""Copies between the host and a GPU from pinned memory, which the driver reads and writes without the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.compute.backends.transfers import Ints, Numbers

_BUFFERS = 4  # uploads in turn, so that none waits for the one before
_ALIGN = 16  # bytes: Triton compiles a kernel again for a tensor that does not begin at a multiple of them
_DTYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}


@dataclass(slots=True)
class _Buffer:
    pinned: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
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
        numbers: Ints = self.numbers.numpy()
        return numbers


@dataclass(frozen=True, slots=True)
class BufferLayout:
    """Where arrays lie in one buffer of bytes."""

    places: tuple[tuple[int, int, tuple[int, ...], torch.dtype], ...]  # for each tensor: first byte, end, shape, dtype
    size: int  # bytes

    @classmethod
    def of(cls, arrays: Sequence[Numbers]) -> BufferLayout:
        """Return the places of `arrays`, one after the other."""
        places, start = [], 0
        for array in arrays:
            places.append((start, start + array.nbytes, array.shape, _DTYPES[array.dtype.type]))
            start += -(-array.nbytes // _ALIGN) * _ALIGN
        return cls(tuple(places), start)

    def pack(self, arrays: Sequence[Numbers], buffer: NDArray[np.uint8]) -> None:
        """Copy `arrays` to their places in `buffer`."""
        for array, (start, end, shape, _) in zip(arrays, self.places, strict=True):
            buffer[start:end].view(array.dtype).reshape(shape)[...] = array

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the arrays in `buffer` [size] uint8."""
        return [buffer[start:end].view(dtype).view(shape) for start, end, shape, dtype in self.places]


class PinnedTransfers:
    """All arrays of an upload go by one copy."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn = device, 0
        self._buffers: list[_Buffer] = []  # made at the first uploads: a backend may be opened where no GPU is

    def up(self, arrays: Sequence[Numbers]) -> list[Tensor]:
        """Return the arrays on the device; each begins at a multiple of 16 bytes."""
        packing = BufferLayout.of(arrays)
        with self._packed(arrays, packing) as pinned:
            uploaded = pinned.to(self._device, non_blocking=True)
        return packing.views(uploaded)

    def up_to(self, arrays: Sequence[Numbers], place: Tensor) -> None:
        """Copy the arrays to `place`, uint8, as their `BufferLayout` says."""
        with self._packed(arrays, BufferLayout.of(arrays)) as pinned:
            place.copy_(pinned, non_blocking=True)

    @contextmanager
    def _packed(self, arrays: Sequence[Numbers], packing: BufferLayout) -> Iterator[Tensor]:
        """Pack `arrays` in pinned memory, which a copy that is enqueued within may read."""
        if len(self._buffers) < _BUFFERS:
            self._buffers.append(_Buffer())
        buffer = self._buffers[self._turn]
        self._turn = (self._turn + 1) % _BUFFERS
        buffer.read.synchronize()
        if len(buffer.pinned) < packing.size:
            buffer.pinned = torch.empty(2 * packing.size, dtype=torch.uint8, pin_memory=True)
        packing.pack(arrays, buffer.pinned.numpy())
        yield buffer.pinned[: packing.size]
        buffer.read.record()

    def down(self, numbers: Tensor) -> PinnedNumbers:
        """Begin to copy `numbers` [n] to the host."""
        pinned = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)  # torch keeps freed pinned memory
        pinned.copy_(numbers, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return PinnedNumbers(pinned, copied)
