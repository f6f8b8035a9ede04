"""Packs weights whose numbers are integers times scales for our kernels, without changing a number.

Parts of one layer with the same blocks and bits are one product. Everything is read in bands of rows, so that packing
needs the memory of a band in addition to the packed weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, repeat

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.backends.weights import Dense, Grouped, InBlocks, PerChannel, Rounded, Weight, read_rows
from services.compute.kernels.bfloat16 import Bfloat16Kernels
from services.compute.kernels.codes import LEAST_BLOCK, MOST_BLOCK, SCALE_ROWS, Bits, InputBits, PackedCodes

_BAND = 1 << 18  # codes packed at a time, about

_BITS: tuple[Bits, ...] = (2, 4, 8)


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The kernels' blocks of a row of inputs; all inputs of a block belong to one group."""

    k: int  # inputs with padding
    size: int  # inputs of a block; the last one may have fewer
    common: int  # blocks that have a scale in common
    groups: tuple[int, ...]  # group of each run of `common` blocks
    order: Tensor | None  # [k] int32, the place of each input, -1 for padding; None: in order

    def same_as(self, other: Blocks) -> bool:
        """Whether both divide rows in the same way."""
        if (self.k, self.size, self.common) != (other.k, other.size, other.common):
            return False
        return self.order is other.order or (
            self.order is not None and other.order is not None and self.order.equal(other.order)
        )


@dataclass(frozen=True, slots=True)
class Part:
    """A weight and how its codes become those of the kernels."""

    weight: Weight
    bits: Bits
    shift: int  # added to the codes, which then mean code - 2^(bits - 1)
    offsets: bool  # the numbers need offsets
    blocks: Blocks
    input_bits: InputBits = 16

    def joins(self, other: Part) -> bool:
        """Whether one product multiplies both weights."""
        mine, others = ((part.bits, part.input_bits, part.offsets) for part in (self, other))
        return mine == others and self.blocks.same_as(other.blocks)


def divide(groups: Tensor, most: int) -> Blocks:
    """Divide inputs with these groups [n_in] into blocks of at most `most`, a power of two.

    Inputs are sorted by group and padded where that needs it.
    """
    n_in = len(groups)
    order = torch.argsort(groups, stable=True)
    distinct, counts = torch.unique_consecutive(groups[order], return_counts=True)
    padded = -(-counts // LEAST_BLOCK) * LEAST_BLOCK
    k = int(padded.sum())
    if len(distinct) == 1:
        return Blocks(k, most, -(-k // most), (int(distinct[0]),), None)
    size = math.gcd(most, *padded[:-1].tolist())
    blocks = -(-padded // size)
    common = math.gcd(*blocks[:-1].tolist())
    # In Python: torch divides a repeat_interleave of these few numbers among threads, which takes longer to begin.
    of_scales = tuple(chain.from_iterable(map(repeat, distinct.tolist(), (-(-blocks // common)).tolist())))
    if torch.equal(padded[:-1], counts[:-1]) and torch.equal(order, torch.arange(n_in)):
        return Blocks(k, size, common, of_scales, None)
    places = torch.full((k,), -1, dtype=torch.int32)
    starts = torch.cumsum(padded, 0) - padded
    of_input = torch.repeat_interleave(starts - (torch.cumsum(counts, 0) - counts), counts)
    places[torch.arange(n_in) + of_input] = order.int()
    return Blocks(k, size, common, of_scales, places)


def holds_integers(weight: Weight) -> bool:
    """Whether the numbers of `weight` are integers times scales."""
    if isinstance(weight, Rounded | InBlocks):
        return True
    return not isinstance(weight, Dense) and not weight.codes.is_floating_point()


def plan(weight: Weight) -> Part | None:
    """Return how the kernels take `weight`; None if its numbers are not integers times scales."""
    if isinstance(weight, Dense) or not holds_integers(weight):
        return None
    if isinstance(weight, Rounded):
        # 4 bits that were just rounded lose far more than inputs of 8 bits do; stored ones keep their quality.
        input_bits: InputBits = 8 if weight.bits == 4 else 16
        return Part(weight, weight.bits, 0, False, divide(weight.groups, MOST_BLOCK[input_bits]), input_bits)
    codes = weight.band(0, 1) if isinstance(weight, InBlocks) else weight
    groups = torch.zeros(weight.shape[1], dtype=torch.int64) if isinstance(codes, PerChannel) else codes.groups
    blocks = divide(groups, MOST_BLOCK[16])
    if codes.codes.dtype is torch.int8:
        return Part(weight, 8, 0, isinstance(codes, Grouped) and codes.offset is not None, blocks)
    assert isinstance(codes, Grouped)
    if isinstance(weight, InBlocks):
        low, high = 0, weight.split.n_codes - 1
    else:
        low, high = (int(end) for end in torch.aminmax(codes.codes))
    bits = next(bits for bits in _BITS if high < 1 << bits)
    zeros = torch.zeros(1, dtype=torch.uint8) if codes.zero is None else codes.zero
    zero, center = int(zeros.flatten()[0]), 1 << (bits - 1)
    # Codes less a common zero are codes of the kernels if they have the bits; otherwise the zeros become offsets.
    common = bool((zeros == zero).all()) and low - zero >= -center and high - zero < center
    offsets = codes.offset is not None or not common
    return Part(weight, bits, center - zero if common else 0, offsets, blocks)


def pack(kernels: Bfloat16Kernels, parts: Sequence[Part], n_zeros: int) -> PackedCodes:
    """Pack parts that join, followed by `n_zeros` rows of zeros."""
    first = parts[0]
    blocks, bits = first.blocks, first.bits
    n_out = sum(part.weight.shape[0] for part in parts) + n_zeros
    height = max(1, _BAND // blocks.k // SCALE_ROWS) * SCALE_ROWS
    scales, offsets = list[Tensor](), list[Tensor]()

    def bands() -> Iterator[Tensor]:
        for part in parts:
            for rows in read_rows(part.weight, height):
                band = part.weight.band(rows.start, rows.stop)
                assert not isinstance(band, Dense)
                scales.append(_of_blocks(band.scale, blocks))
                if part.offsets:
                    offsets.append(_of_blocks(_offset(band, part), blocks))
                yield _codes(band, part)
        if n_zeros:
            yield torch.zeros(n_zeros, blocks.k, dtype=torch.uint8)

    codes = kernels.pack_codes(_in_steps(bands(), SCALE_ROWS), n_out, blocks.k, bits, first.input_bits)
    if any(band.dtype is not torch.float16 for band in (*scales, *offsets)):
        scales, offsets = [band.float() for band in scales], [band.float() for band in offsets]
    return PackedCodes(
        n_out=n_out,
        n_in=first.weight.shape[1],
        k=blocks.k,
        block=blocks.size,
        common=blocks.common,
        bits=bits,
        input_bits=first.input_bits,
        codes=codes,
        scales=_grouped(scales, n_out),
        offsets=_grouped(offsets, n_out) if offsets else None,
        order=blocks.order,
    )


def _codes(band: Grouped | PerChannel, part: Part) -> Tensor:
    """Return the codes of the kernels: [n, k] uint8."""
    codes = band.codes.view(torch.uint8) ^ 128 if band.codes.dtype is torch.int8 else band.codes
    codes = codes + part.shift if part.shift else codes
    blocks = part.blocks
    if blocks.order is not None:
        return codes.index_select(1, blocks.order.clamp(min=0))  # padding is multiplied with zeros
    n_missing = blocks.k - codes.shape[1]
    return F.pad(codes, (0, n_missing)) if n_missing else codes.contiguous()


def _offset(band: Grouped | PerChannel, part: Part) -> Tensor:
    """Return what is added to (code - 2^(bits - 1)) * scale, which stands for (code - zero) * scale + offset."""
    assert isinstance(band, Grouped)
    center = 1 << (part.bits - 1)
    offset = torch.zeros(band.scale.shape) if band.offset is None else band.offset.float()
    if band.codes.dtype is torch.int8:
        return offset
    zero = 0 if band.zero is None else band.zero.float()
    return offset + (center - part.shift - zero) * band.scale.float()


def _of_blocks(per_group: Tensor, blocks: Blocks) -> Tensor:
    """Return the numbers of the groups for each block, in float16 if that is exact, otherwise in float32."""
    numbers = per_group.float()
    half = numbers.half()
    return (half if torch.equal(half.float(), numbers) else numbers).index_select(1, torch.tensor(blocks.groups))


def _grouped(bands: Sequence[Tensor], n_out: int) -> Tensor:
    """Return bands of [n, groups] as [n_out / 64, groups, 64] with zeros for missing rows."""
    whole = torch.cat(list(bands))
    rows = -(-n_out // SCALE_ROWS) * SCALE_ROWS
    return F.pad(whole, (0, 0, 0, rows - len(whole))).view(-1, SCALE_ROWS, whole.shape[1]).transpose(1, 2).contiguous()


def _in_steps(bands: Iterator[Tensor], step: int) -> Iterator[Tensor]:
    """Yield the same rows in blocks of a multiple of `step` rows, the last block with the rest."""
    rest: Tensor | None = None
    for band in bands:
        whole = band if rest is None else torch.cat((rest, band))
        full = len(whole) // step * step
        if full:
            yield whole[:full].contiguous()
        rest = whole[full:].clone() if full < len(whole) else None
    if rest is not None:
        yield rest
