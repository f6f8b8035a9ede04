"""A weight as a value: its rows as a checkpoint stores them, until a device packs them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Dense:
    """A weight [n_out, n_in] in parts that lie below each other, each a view of what is stored, of any float dtype.

    The views are memory-mapped. A device copies them as it packs them, so that loading holds a block of rows besides
    the result, not a second weight.
    """

    parts: tuple[Tensor, ...]  # [n, n_in] each

    @property
    def shape(self) -> tuple[int, int]:
        """Return (n_out, n_in)."""
        return sum(len(part) for part in self.parts), self.parts[0].shape[1]

    def copy(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return all rows as a tensor of its own."""
        weight = torch.empty(self.shape, dtype=dtype, device=device)
        start = 0
        for part in self.parts:
            weight[start : start + len(part)].copy_(part)
            start += len(part)
        return weight

    def blocks(self, height: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """Yield `height` rows after the other, the last time fewer; each contiguous, and a view where it can be."""
        n_out = self.shape[0]
        for start in range(0, n_out, height):
            yield self._rows(start, min(start + height, n_out)).to(dtype).contiguous()

    def _rows(self, start: int, stop: int) -> Tensor:
        found, first = [], 0
        for part in self.parts:
            low, high = max(start - first, 0), min(stop - first, len(part))
            if low < high:
                found.append(part[low:high])
            first += len(part)
        return found[0] if len(found) == 1 else torch.cat(found)
