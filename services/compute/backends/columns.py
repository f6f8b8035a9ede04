"""Weights whose inputs are in another order than the stored ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.compute.backends.weights import BlockSplit, Dense, Grouped, InBlocks, PerChannel, Weight


def take_columns(weight: Weight, columns: Tensor) -> Weight:
    """Return the weight of the inputs with the numbers `columns` [n], in its form; not of one that is rounded."""
    match weight:
        case Dense():
            return Dense(weight.values.index_select(1, columns))
        case Grouped():
            return _grouped(weight, columns)
        case InBlocks():
            return InBlocks(weight.blocks, TakenColumns(weight.split, columns))
        case PerChannel():
            return PerChannel(weight.codes.index_select(1, columns), weight.scale)
    raise TypeError("a weight is rounded after its inputs are in order")


@dataclass(frozen=True, slots=True)
class TakenColumns:
    """Takes rows of a file's blocks apart, and takes some of their columns."""

    split: BlockSplit
    columns: Tensor  # [n_in] int64

    @property
    def n_codes(self) -> int:
        """Codes are uint8 below this number; 0: they are int8."""
        return self.split.n_codes

    @property
    def groups(self) -> Tensor:
        """The group of each input: [n_in] int64."""
        return _neighbours(self.split.groups[self.columns])[1]

    def grouped(self, blocks: Tensor) -> Grouped:
        """Return the weight of rows of blocks, [n, blocks of a row, n_bytes] uint8."""
        return _grouped(self.split.grouped(blocks), self.columns)

    def ends(self, blocks: Tensor) -> tuple[float, float]:
        """Return bounds of the numbers of such rows; NaN if a number is NaN."""
        return self.split.ends(blocks)


def _grouped(weight: Grouped, columns: Tensor) -> Grouped:
    stored, groups = _neighbours(weight.groups[columns])
    zero, offset = (None if part is None else part.index_select(1, stored) for part in (weight.zero, weight.offset))
    return Grouped(weight.codes.index_select(1, columns), weight.scale.index_select(1, stored), zero, groups, offset)


def _neighbours(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return the groups of runs of inputs, in order, and the run of each input."""
    stored, runs = torch.unique_consecutive(groups, return_inverse=True)
    return stored, runs
