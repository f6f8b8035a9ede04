"""Reads experts in MXFP4 as gpt-oss stores them (OCP Microscaling Formats 1.0): exactly, as integers times scales.

A stack of matrices [n_experts, out, in] is two tensors of bytes: `*_blocks` [n_experts, out, in / 32, 16] holds two
codes in a byte, the first in its low bits, and `*_scales` [n_experts, out, in / 32] exponents with a bias of 127.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from services.compute.backends.weights import Grouped
from services.compute.model.formats.stored import StoredTensors
from services.compute.model.shard import Shard, Span

_BLOCK, _BYTES = 32, 16
_POSITIVE = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the numbers of the codes 0 to 7 (e2m1)
_NUMBERS = torch.tensor([*_POSITIVE, *(-number for number in _POSITIVE)], dtype=torch.int8)
_BIAS = 127 + 1  # exponent bias, plus one because the numbers are doubled


class MicroscaledReader:
    """The stacks of one checkpoint in MXFP4."""

    def __init__(self, files: StoredTensors) -> None:
        self._files = files

    def holds(self, module: str) -> bool:
        """Whether the stack `module` is stored quantized."""
        return any(name in self._files.names for name, _ in self.names(module))

    def holds_codes(self, module: str) -> bool:
        """Whether the codes of the stack `module` are stored."""
        return f"{module}_blocks" in self._files.names

    def names(self, module: str) -> Iterator[tuple[str, bool]]:
        """Yield the names of a stack's tensors, which are all required."""
        yield f"{module}_blocks", True
        yield f"{module}_scales", True

    def codes(self, module: str, shape: tuple[int, int]) -> tuple[str, bool, tuple[int, ...]]:
        """Return the name of a stack's codes, that a matrix is stored [out, in], and its expected shape."""
        return f"{module}_blocks", False, (shape[0], -(-shape[1] // _BLOCK), _BYTES)

    def weight(self, shard: Shard) -> Grouped:
        """Return a part of one matrix, which counts rows over the whole stack. Raises ModelError."""
        n_out, blocks = shard.shape[0], Span(shard.cols.start // _BLOCK, -(-shard.cols.stop // _BLOCK))
        n_experts, n_blocks = self._files.shape(f"{shard.key}_scales")[0], -(-shard.shape[1] // _BLOCK)
        size = n_out // n_experts
        expert, first = divmod(shard.rows.start, size)
        rows, part = slice(first, first + len(shard.rows)), slice(blocks.start, blocks.stop)
        sizes = (n_experts, size, n_blocks)
        packed = self._files.slice(f"{shard.key}_blocks", (*sizes, _BYTES), ("U8",))[expert, rows, part]
        exponents = self._files.slice(f"{shard.key}_scales", sizes, ("U8",))[expert, rows, part]
        pairs = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)  # [n, n_blocks * 32]
        skipped = shard.cols.start - blocks.start * _BLOCK
        codes = _NUMBERS[pairs[:, skipped : skipped + len(shard.cols)].int()]
        groups = torch.arange(shard.cols.start, shard.cols.stop) // _BLOCK - blocks.start
        return Grouped(codes, torch.exp2(exponents.float() - _BIAS), None, groups)
