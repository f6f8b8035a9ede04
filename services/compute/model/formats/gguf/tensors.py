"""The tensors of a GGUF model: memory-mapped; parts of quantized ones are taken apart into the worker's weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

import torch
from torch import Tensor

from services.compute.backends.weights import Grouped, InBlocks
from services.compute.model.formats.gguf.blocks import QUANTIZED, BlockType
from services.compute.model.formats.gguf.container import GgufFile, TensorInfo
from services.compute.model.shard import Shard, Span
from services.compute.model.spec import ModelError

_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class GgufTensors:
    """The mapped files of one model, with the interface of `TensorFiles`."""

    def __init__(self, path: Path, file: GgufFile) -> None:
        """`path` names the model in messages. Raises ModelError."""
        self.folder = path
        self._tensors = file.tensors
        files = {info.file for info in file.tensors.values()}
        self._mapped = {file: _mapped(file) for file in files}

    def close(self) -> None:
        """Let the mappings go; a weight that is a view keeps its own."""
        self._mapped = {}

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors."""
        return self._tensors.keys()

    @property
    def unlisted(self) -> Collection[str]:
        """A header lists all tensors."""
        return ()

    def file(self, name: str) -> Path:
        """Return the file that holds a tensor."""
        return self._tensors[name].file

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape, in elements."""
        return self._tensors[name].shape

    def dtype(self, name: str) -> str:
        """Return the type by ggml's name."""
        return self._tensors[name].type.name

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor of an unquantized type; a view of the file."""
        info = self._tensors[name]
        return self._bytes(info).view(_DENSE[info.type.name]).view(info.shape)

    def slice(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = tuple(_DENSE)) -> Tensor:
        """Return a tensor of an unquantized type. Raises ModelError for another shape or type."""
        info = self._tensors[name]
        if info.shape != shape:
            raise ModelError(f"{info.file}: {name}: expected shape {list(shape)}, found {list(info.shape)}")
        if info.type.name not in dtypes:
            raise ModelError(f"{info.file}: {name}: expected {' or '.join(dtypes)}, found {info.type.name}")
        return self.whole(name)

    def blocks(self, name: str) -> Tensor:
        """Return a quantized tensor's blocks, [n_rows, blocks of a row, n_bytes]; stacked matrices are one."""
        info = self._tensors[name]
        return self._bytes(info).view(math.prod(info.shape[:-1]), info.shape[-1] // info.type.block, info.type.n_bytes)

    def _bytes(self, info: TensorInfo) -> Tensor:
        return self._mapped[info.file][info.offset : info.offset + info.n_bytes]


class BlockReader:
    """The quantized matrices of a model, with the interface of `GridReader`; a module is a name without `.weight`."""

    def __init__(self, files: GgufTensors) -> None:
        self._files = files

    def holds(self, module: str) -> bool:
        """Whether `module` is stored quantized."""
        name = _weight(module)
        return name in self._files.names and self._files.dtype(name) in QUANTIZED

    def holds_codes(self, module: str) -> bool:
        """Whether `module` is stored quantized: its codes and scales are one tensor."""
        return self.holds(module)

    def names(self, module: str) -> Iterator[tuple[str, bool]]:
        """Yield the names of a module's tensors, and whether each is required."""
        yield _weight(module), True

    def codes(self, module: str, shape: tuple[int, int]) -> tuple[str, bool, tuple[int, int]]:
        """Return the name of a module's tensor, that it is stored [out, in], and its expected shape."""
        return _weight(module), False, shape

    def weight(self, shard: Shard) -> InBlocks:
        """Return a part of a module's weight: all its numbers, in groups as stored."""
        name, cols = _weight(shard.key), shard.cols
        kind, blocks = QUANTIZED[self._files.dtype(name)], self._files.blocks(name)
        size = shard.shape[1] // blocks.shape[1]  # elements of a block
        wide = _covering(cols, size)
        cells = blocks[shard.rows.start : shard.rows.stop, wide.start : wide.stop]
        return InBlocks(cells, ColumnSplit(kind, Span(cols.start - wide.start * size, cols.stop - wide.start * size)))


class ColumnSplit:
    """Takes rows of blocks of a type apart, and keeps some of their columns."""

    def __init__(self, kind: BlockType, cols: Span) -> None:
        self.n_codes = kind.n_codes
        self._kind, self._cols, self._kept = kind, cols, _covering(cols, kind.group)
        self.groups = torch.arange(cols.start, cols.stop) // kind.group - self._kept.start

    def grouped(self, blocks: Tensor) -> Grouped:
        """Return the weight of rows of blocks, [n, blocks of a row, n_bytes] uint8."""
        parts, n = self._kind.split(blocks.flatten(0, 1)), len(blocks)
        codes = parts.codes().view(n, -1)[:, self._cols.start : self._cols.stop].contiguous()
        scale, zero = self._of_groups(parts.scale, n), None
        if parts.zero:
            zero = torch.full(scale.shape, parts.zero, dtype=torch.uint8)
        offset = None if parts.offset is None else self._of_groups(parts.offset, n)
        return Grouped(codes, scale, zero, self.groups, offset)

    def ends(self, blocks: Tensor) -> tuple[float, float]:
        """Return bounds of the numbers of such rows; NaN if a number is NaN."""
        parts, n = self._kind.split(blocks.flatten(0, 1)), len(blocks)
        codes = torch.tensor([0, self.n_codes - 1] if self.n_codes else [-128, 127]).view(2, 1, 1)
        numbers = (codes - parts.zero) * self._of_groups(parts.scale, n).float()
        if parts.offset is not None:
            numbers += self._of_groups(parts.offset, n).float()
        low, high = torch.aminmax(numbers)
        return float(low), float(high)

    def _of_groups(self, numbers: Tensor, n: int) -> Tensor:
        return numbers.view(n, -1)[:, self._kept.start : self._kept.stop]


def _mapped(file: Path) -> Tensor:
    """Return the bytes of a file; they are read when they are used."""
    try:
        return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ModelError(f"{file}: {error}") from error


def _weight(module: str) -> str:
    return f"{module}.weight"


def _covering(span: Span, size: int) -> Span:
    """Return the numbers of the parts of `size` elements that `span` touches."""
    return Span(span.start // size, -(-span.stop // size))
