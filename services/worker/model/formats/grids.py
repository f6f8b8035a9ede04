"""Reads parts of quantized weights: the stored words that a rank's share touches, and no others."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from services.worker.model.formats.layout import Grid, Layout, Packing
from services.worker.model.formats.safetensors import TensorFiles
from services.worker.model.shard import Span
from services.worker.model.spec import ModelError

_BAND = 1024  # rows that are unpacked at a time: what that takes beside the weight itself stays small


class GridReader:
    """The quantized modules of one checkpoint."""

    def __init__(self, files: TensorFiles, layout: Layout) -> None:
        self._files, self._layout = files, layout

    def holds(self, module: str) -> bool:
        """Whether `module` is stored quantized: its tensors say so, whatever lists of exceptions do."""
        names = self._files.names
        if any(f"{module}.{suffix}" in names for suffix in self._layout.scales.suffixes):
            return True
        codes = self._name(self._layout.codes, module)
        return codes in names and self._files.dtype(codes) in self._layout.codes.dtypes

    def names(self, module: str) -> Iterator[tuple[str, bool]]:
        """Yield the names of a module's tensors, and whether each has to be there."""
        for grid in self._layout.grids:
            yield self._name(grid, module), not set(grid.suffixes) & set(self._layout.optional)
        if self._layout.groups:
            yield f"{module}.{self._layout.groups}", self._layout.groups not in self._layout.optional
        yield from ((f"{module}.{suffix}", False) for suffix in self._layout.unread)

    def codes(self, module: str, shape: tuple[int, int]) -> tuple[str, bool, tuple[int, int]]:
        """Return the name of a module's codes, whether they are stored [in, out], and the shape they should have."""
        codes = self._layout.codes
        return self._name(codes, module), codes.transposed, codes.stored(shape)

    def matrix(self, module: str, shape: tuple[int, int], rows: Span, cols: Span) -> Tensor:
        """Return float32 [rows, cols] of a weight of `shape`. Raises ModelError."""
        layout, found = self._layout, torch.empty(len(rows), len(cols))
        groups = self._groups(module, shape, cols)
        for start in range(rows.start, rows.stop, _BAND):
            band = Span(start, min(start + _BAND, rows.stop))
            part = self._read(layout.codes, module, shape, band, cols).float()
            if layout.zeros is not None and self._name(layout.zeros, module) in self._files.names:
                part -= self._read(layout.zeros, module, shape, band, cols, groups)
            part *= self._read(layout.scales, module, shape, band, cols, groups)
            found[band.start - rows.start : band.stop - rows.start] = part
        return found

    def _name(self, grid: Grid, module: str) -> str:
        names = [f"{module}.{suffix}" for suffix in grid.suffixes]
        return next((name for name in names if name in self._files.names), names[0])

    def _groups(self, module: str, shape: tuple[int, int], cols: Span) -> Tensor | None:
        """Return the group of each of `cols`, where that is stored."""
        name = f"{module}.{self._layout.groups}"
        if not self._layout.groups or name not in self._files.names:
            return None
        groups: Tensor = self._files.slice(name, (shape[1],), ("I32", "I64"))[cols.start : cols.stop]
        n_groups = self._layout.scales.cells(shape)[1]
        if ((groups < 0) | (groups >= n_groups)).any():
            raise ModelError(f"{self._files.file(name)}: {name}: expected groups from 0 to {n_groups - 1}")
        return groups.long()

    def _read(
        self, grid: Grid, module: str, shape: tuple[int, int], rows: Span, cols: Span, groups: Tensor | None = None
    ) -> Tensor:
        """Return the number of every element of [rows, cols]; dimensions that share one number have size 1.

        `groups`: the block of each column, which is its place in their order where they are None.
        """
        n_rows, n_cols = grid.cells(shape)
        wanted_rows = _covering(rows, grid.block[0])
        wanted_cols = Span(0, n_cols) if groups is not None else _covering(cols, grid.block[1])
        found = self._cells(grid, module, shape, wanted_rows, wanted_cols) + grid.offset
        if grid.block[0] != 1 and n_rows > 1:
            found = found.index_select(0, _places(rows, grid.block[0]))
        if groups is not None and n_cols > 1:
            return found.index_select(1, groups)
        if grid.block[1] != 1 and n_cols > 1:
            return found.index_select(1, _places(cols, grid.block[1]))
        return found

    def _cells(self, grid: Grid, module: str, shape: tuple[int, int], rows: Span, cols: Span) -> Tensor:
        """Return [rows, cols] of the grid's numbers about a weight of `shape`."""
        spans, packing = [rows, cols], grid.packing
        if packing is not None:
            spans[packing.dim] = _covering(spans[packing.dim], packing.per_word)
        words = self._words(grid, self._name(grid, module), grid.stored(shape), spans)
        if packing is None:
            return words if words.dtype.is_floating_point and words.dtype.itemsize > 1 else words.float()
        first = (rows, cols)[packing.dim].start % packing.per_word
        return _unpack(words, packing).narrow(packing.dim, first, len((rows, cols)[packing.dim]))

    def _words(self, grid: Grid, name: str, sizes: tuple[int, int], spans: list[Span]) -> Tensor:
        """`sizes`: of the stored tensor."""
        if grid.transposed:
            spans.reverse()
        shape: tuple[int, ...] = sizes
        found = self._files.shape(name)
        if len(found) < 2 and [size for size in found if size > 1] == [size for size in sizes if size > 1]:
            shape = found  # a single number, or a vector of those along the other dimension
        stored = self._files.slice(name, shape, grid.dtypes)
        if len(shape) < 2:
            stored = self._files.whole(name).reshape(sizes)
        words: Tensor = stored[spans[0].start : spans[0].stop, spans[1].start : spans[1].stop]
        return words.t() if grid.transposed else words


def _covering(span: Span, block: int) -> Span:
    """Return the blocks that `span` touches; all elements are in one where `block` is 0."""
    return Span(span.start // block, -(-span.stop // block)) if block else Span(0, 1)


def _places(span: Span, block: int) -> Tensor:
    """Return in which of the blocks that it touches each element of `span` lies."""
    return torch.arange(span.start, span.stop) // block - span.start // block


def _unpack(words: Tensor, packing: Packing) -> Tensor:
    """Return what lies in the words, as many times longer along the packed dimension."""
    places = torch.tensor(packing.places or range(packing.per_word), dtype=torch.int32) * packing.bits
    shape = [1, 1, 1]
    shape[packing.dim + 1] = packing.per_word
    numbers = ((words.unsqueeze(packing.dim + 1) >> places.view(shape)) + packing.less) & ((1 << packing.bits) - 1)
    return numbers.flatten(packing.dim, packing.dim + 1)
