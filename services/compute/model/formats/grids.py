"""Reads parts of quantized weights: only the stored words that a rank's share touches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from services.compute.backends.weights import Grouped, PerChannel
from services.compute.model.formats.stored import StoredTensors
from services.compute.model.layout import Grid, Layout, Packing
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelError

_BAND = 1024  # rows unpacked at a time, to bound the memory besides the weight


class GridReader:
    """The quantized modules of one checkpoint."""

    def __init__(self, files: StoredTensors, layout: Layout) -> None:
        self._files, self._layout = files, layout

    def holds(self, module: str) -> bool:
        """Whether `module` is stored quantized, by its tensors; lists of exceptions are not used."""
        names = self._files.names
        if any(f"{module}.{suffix}" in names for suffix in self._layout.scales.suffixes):
            return True
        return self.holds_codes(module)

    def holds_codes(self, module: str) -> bool:
        """Whether the codes of `module` are stored in a dtype of this layout."""
        codes = self._name(self._layout.codes, module)
        return codes in self._files.names and self._files.dtype(codes) in self._layout.codes.dtypes

    def names(self, module: str) -> Iterator[tuple[str, bool]]:
        """Yield the names of a module's tensors, and whether each is required."""
        for grid in self._layout.grids:
            yield self._name(grid, module), not set(grid.suffixes) & set(self._layout.optional)
        if self._layout.groups:
            yield f"{module}.{self._layout.groups}", self._layout.groups not in self._layout.optional
        yield from ((f"{module}.{suffix}", False) for suffix in self._layout.unread)

    def codes(self, module: str, shape: tuple[int, int]) -> tuple[str, bool, tuple[int, int]]:
        """Return the name of a module's codes, whether they are stored [in, out], and their expected shape."""
        codes = self._layout.codes
        return self._name(codes, module), codes.transposed, codes.stored(shape)

    def weight(self, shard: Shard) -> Grouped | PerChannel:
        """Return a part of a module's weight in its stored form. Raises ModelError."""
        layout, (groups, of_inputs) = self._layout, self._groups(shard)
        codes, zero = self._codes(shard), None
        if layout.zeros is not None and self._name(layout.zeros, shard.key) in self._files.names:
            zero = self._per_group(layout.zeros, shard, groups).int() + layout.zeros.offset
            zero = self._middle(layout.zeros, shard, zero) if layout.symmetric else zero
        scale = self._per_group(layout.scales, shard, groups)
        scale = 1 / scale.float() if layout.scales.inverse else scale
        symmetric = zero is None or not zero.any()
        if codes.dtype is not torch.uint8 and symmetric and len(groups) == 1:
            return PerChannel(codes, scale)
        if codes.is_floating_point():
            return Grouped(codes, scale, None, of_inputs)
        # Codes moved to start at 0 mean the same if the zeros move with them.
        middle = -layout.codes.offset
        if codes.dtype is torch.int8:
            codes, middle = codes.view(torch.uint8) ^ 128, middle + 128
        zero = torch.full(scale.shape, middle) if zero is None else zero + middle
        return Grouped(codes, scale, zero.to(torch.uint8), of_inputs)

    def _middle(self, grid: Grid, shard: Shard, zero: Tensor) -> Tensor:
        """Return the zeros of symmetric codes, which are stored as they are or less 1. Raises ModelError for others."""
        packing = grid.packing
        assert packing is not None, "symmetric codes have packed zeros"
        middle = 1 << (packing.bits - 1)
        stored = (zero - packing.less) % (1 << packing.bits)
        if not any((stored == value).all() for value in (middle, middle - 1)):
            name = self._name(grid, shard.key)
            zeros = ", ".join(map(str, sorted(set(stored.flatten().tolist()))))
            raise ModelError(
                f"{self._files.file(name)}: {name}: zeros {zeros}, but sym is true: expected {middle - 1} in all "
                f"(gptq), or {middle} in all (gptq_v2)"
            )
        return torch.full_like(zero, middle)

    def _name(self, grid: Grid, module: str) -> str:
        names = [f"{module}.{suffix}" for suffix in grid.suffixes]
        return next((name for name in names if name in self._files.names), names[0])

    def _groups(self, shard: Shard) -> tuple[Span, Tensor]:
        """Return the groups of inputs that the part needs, and the index of each input's group among them."""
        block, n_groups = self._layout.scales.block[1], self._layout.scales.cells(shard.shape)[1]
        name, cols = f"{shard.key}.{self._layout.groups}", shard.cols
        if not self._layout.groups or name not in self._files.names:
            return _covering(cols, block), _places(cols, block)
        whole: Tensor = self._files.slice(name, (shard.shape[1],), ("I32", "I64"))[:]
        if self._layout.groups in self._layout.optional and not whole.any():  # left out by its writer, except its shape
            return _covering(cols, block), _places(cols, block)
        groups = whole[cols.start : cols.stop]
        if ((groups < 0) | (groups >= n_groups)).any():
            raise ModelError(f"{self._files.file(name)}: {name}: expected groups from 0 to {n_groups - 1}")
        return Span(0, n_groups), groups.long()

    def _per_group(self, grid: Grid, shard: Shard, groups: Span) -> Tensor:
        """Return the number of each row in each of `groups`."""
        block = grid.block[0]
        cells = self._cells(grid, replace(shard, rows=_covering(shard.rows, block), cols=groups))
        return cells if block == 1 else cells.index_select(0, _places(shard.rows, block))

    def _codes(self, shard: Shard) -> Tensor:
        """Return the stored codes; packed codes become bytes."""
        grid, rows = self._layout.codes, shard.rows
        if grid.packing is None:
            return self._cells(grid, shard)
        if grid.packing.planes:
            return self._of_planes(grid, grid.packing, shard)
        codes = torch.empty(len(rows), len(shard.cols), dtype=torch.uint8)
        for start in range(rows.start, rows.stop, _BAND):
            band = Span(start, min(start + _BAND, rows.stop))
            codes[band.start - rows.start : band.stop - rows.start] = self._cells(grid, replace(shard, rows=band))
        return codes

    def _of_planes(self, grid: Grid, packing: Packing, shard: Shard) -> Tensor:
        """Return codes whose words hold outputs that are far from each other."""
        n_words = grid.stored(shard.shape)[0]
        name = self._name(grid, shard.key)
        words = self._words(grid, name, grid.stored(shard.shape), [Span(0, n_words), shard.cols])
        row = torch.arange(shard.rows.start, shard.rows.stop)
        shifts = (row // n_words * packing.bits).to(torch.uint8).unsqueeze(1)
        return (words.index_select(0, row % n_words) >> shifts) & ((1 << packing.bits) - 1)

    def _cells(self, grid: Grid, shard: Shard) -> Tensor:
        """Return a grid's numbers for a weight of `shard.shape`; `rows` and `cols` of the shard count blocks."""
        spans, packing = [shard.rows, shard.cols], grid.packing
        if packing is not None:
            spans[packing.dim] = _covering(spans[packing.dim], packing.per_word)
        words = self._words(grid, self._name(grid, shard.key), grid.stored(shard.shape), spans)
        if packing is None:
            return words
        wanted = (shard.rows, shard.cols)[packing.dim]
        return _unpack(words, packing).narrow(packing.dim, wanted.start % packing.per_word, len(wanted))

    def _words(self, grid: Grid, name: str, sizes: tuple[int, int], spans: list[Span]) -> Tensor:
        """Return the words of the part `spans` of a stored tensor of the given sizes."""
        if grid.transposed:
            spans.reverse()
        shape: tuple[int, ...] = sizes
        actual = self._files.shape(name)
        if len(actual) < 2 and [size for size in actual if size > 1] == [size for size in sizes if size > 1]:
            shape = actual  # a single number, or a vector of those along the other dimension
        stored = self._files.slice(name, shape, grid.dtypes)
        if len(shape) < 2:
            stored = self._files.whole(name).reshape(sizes)
        words: Tensor = stored[spans[0].start : spans[0].stop, spans[1].start : spans[1].stop]
        return words.t() if grid.transposed else words


def _covering(span: Span, block: int) -> Span:
    """Return the blocks that `span` touches; with `block` 0 all elements are in one block."""
    return Span(span.start // block, -(-span.stop // block)) if block else Span(0, 1)


def _places(span: Span, block: int) -> Tensor:
    """Return the index of each element's block among the blocks that `span` touches; `block` 0: one block."""
    if not block:
        return torch.zeros(len(span), dtype=torch.int64)
    return torch.arange(span.start, span.stop) // block - span.start // block


def _unpack(words: Tensor, packing: Packing) -> Tensor:
    """Return the numbers in the words; the packed dimension becomes `packing.per_word` times longer."""
    places = torch.tensor(packing.places or range(packing.per_word), dtype=torch.int32) * packing.bits
    shape = [1, 1, 1]
    shape[packing.dim + 1] = packing.per_word
    numbers = ((words.unsqueeze(packing.dim + 1) >> places.view(shape)) + packing.less) & ((1 << packing.bits) - 1)
    return numbers.flatten(packing.dim, packing.dim + 1)
