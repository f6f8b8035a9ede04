"""Layouts of keys and values in the cache; `FORMAT` of a file of `kv_formats/` opens one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from services.compute.backends.shapes import AttentionShape, KvShape


class CodedNumbers(Protocol):
    """A format of codes with scales, as a device's kernels see it."""

    @property
    def codes(self) -> torch.dtype:
        """The dtype of the codes."""
        ...

    @property
    def largest(self) -> float:
        """The largest code."""
        ...

    def put(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, width] to the positions `slots` [n] of a layer."""
        ...


class RowWriter(Protocol):
    """A device's writes into the cache."""

    def scatter(self, table: Tensor, places: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, width] to the rows `places` [n] of `table` [n_rows, width], of one dtype."""
        ...

    def rotate_scatter(
        self, table: Tensor, slots: Tensor, heads: Tensor, n_rotated: int, rotation: Callable[[Tensor], None]
    ) -> None:
        """Rotate the first `n_rotated` of `heads` [n, n_heads, head_dim], and write the last ones to `table`."""
        ...

    def scatter_codes(self, form: CodedNumbers, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, width] to the positions `slots` [n] of a layer in the format `form`."""
        ...

    def rotate_scatter_codes(
        self,
        form: CodedNumbers,
        layer: Tensor,
        shape: KvShape,
        slots: Tensor,
        heads: Tensor,
        n_rotated: int,
        rotation: Callable[[Tensor], None],
    ) -> None:
        """Rotate the first `n_rotated` of `heads` [n, n_heads, head_dim] in place; write the last ones to `slots`."""
        ...


class AttentionKernels(Protocol):
    """A device's attentions that read the cache as it is stored: constructors, best first; none if none applies."""

    def over_numbers(self, shape: AttentionShape, numbers: torch.dtype) -> Sequence[Callable[[], Any]]:
        """Return attentions over layers of plain `numbers`."""
        ...

    def over_codes(self, shape: AttentionShape, form: CodedNumbers) -> Sequence[Callable[[], Any]]:
        """Return attentions over layers of codes in the format `form`."""
        ...


class KvFormat(Protocol):
    """Allocates, writes and reads a layer of the cache.

    A layer is one contiguous tensor whose first dimension is the block, so one copier of blocks serves all formats.
    """

    name: str
    numbers: torch.dtype | None  # dtype of layers [n_blocks, block_tokens, 2, n_kv_heads, head_dim] for kernels

    def token_bytes(self, shape: KvShape) -> int:
        """Return the bytes of a token in a layer."""
        ...

    def allocate(self, n_blocks: int, shape: KvShape, device: torch.device) -> Tensor:
        """Return a layer whose positions all read as zeros."""
        ...

    def write(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor, writer: RowWriter) -> None:
        """Write `rows` [n, width] to the positions `slots` [n]; `writer` is the device's."""
        ...

    def write_rotated(
        self,
        layer: Tensor,
        shape: KvShape,
        slots: Tensor,
        heads: Tensor,
        n_rotated: int,
        rotation: Callable[[Tensor], None],
        writer: RowWriter,
    ) -> None:
        """Rotate the first `n_rotated` of `heads` [n_rows, n_heads, head_dim]; write the last ones to `slots` [n].

        Queries are rotated in place; keys may be.
        """
        ...

    def read(self, layer: Tensor, shape: KvShape, slots: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the positions `slots` [n] as [n, width] of `dtype`; in `out` if given."""
        ...

    def attentions(self, shape: AttentionShape, kernels: AttentionKernels) -> Sequence[Callable[[], Any]]:
        """Return a device's attentions over this format, best first; the caller adds one that uses `read`."""
        ...


@dataclass(frozen=True, slots=True)
class PlainNumbers:
    """Numbers of one dtype; rows of another dtype are rounded to it."""

    name: str
    numbers: torch.dtype

    def token_bytes(self, shape: KvShape) -> int:
        """Return the bytes of a token in a layer."""
        return shape.width * self.numbers.itemsize

    def allocate(self, n_blocks: int, shape: KvShape, device: torch.device) -> Tensor:
        """Return a layer of zeros, [n_blocks, block_tokens, 2, n_kv_heads, head_dim].

        K and V of a token are adjacent, so that one copy writes and one gather reads both.
        """
        sizes = (n_blocks, shape.block_tokens, 2, shape.n_kv_heads, shape.head_dim)
        return torch.zeros(sizes, dtype=self.numbers, device=device)

    def write(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor, writer: RowWriter) -> None:
        """Write `rows` [n, width] to the positions `slots` [n]."""
        rounded = rows if rows.dtype is self.numbers else rows.to(self.numbers)
        writer.scatter(layer.view(-1, shape.width), slots, rounded)

    def write_rotated(
        self,
        layer: Tensor,
        shape: KvShape,
        slots: Tensor,
        heads: Tensor,
        n_rotated: int,
        rotation: Callable[[Tensor], None],
        writer: RowWriter,
    ) -> None:
        """Rotate the first `n_rotated` of `heads` [n_rows, n_heads, head_dim]; write the last ones to `slots` [n]."""
        if heads.dtype is self.numbers:
            writer.rotate_scatter(layer.view(-1, shape.width), slots, heads, n_rotated, rotation)
        else:
            rotation(heads[:, :n_rotated])
            self.write(layer, shape, slots, heads.view(len(heads), -1)[: len(slots), -shape.width :], writer)

    def read(self, layer: Tensor, shape: KvShape, slots: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the positions `slots` [n] as [n, width] of `dtype`."""
        rows = layer.view(-1, shape.width)
        if dtype is self.numbers:
            return torch.index_select(rows, 0, slots, out=out)
        found = rows.index_select(0, slots).to(dtype)
        return found if out is None else out.copy_(found)

    def attentions(self, shape: AttentionShape, kernels: AttentionKernels) -> Sequence[Callable[[], Any]]:
        """Return the device's attentions over plain numbers."""
        return kernels.over_numbers(shape, self.numbers)


def find_kv_format(name: str) -> KvFormat:
    """Return the format of that name, a file of `kv_formats/`."""
    found: KvFormat = import_module(f"services.compute.backends.kv_formats.{name}").FORMAT.open()
    return found


def plain_format(dtype: torch.dtype) -> KvFormat:
    """Return the format of plain numbers of `dtype`."""
    return find_kv_format(str(dtype).removeprefix("torch."))
