"""The sum that LoRA adapters add to a linear layer, in Triton: B (A x) of each row, with the factors of the row's slot.

Each row has programs of its own, which sum in an order that the layer and the adapter's rank determine: a row's bits
depend neither on other rows nor on their adapters. Rows without an adapter end at once.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError


@triton.jit(do_not_specialize=["x_stride"])
def shrink(
    x,  # [n, n_in]
    x_stride,
    a,  # [n_slots, max_rank, n_in]
    ranks,  # [n_slots] int64
    slots,  # [n] int64; -1: no adapter
    inner,  # [n, max_rank] float32; beyond a row's rank nothing is written
    n_in: tl.constexpr,
    max_rank: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_ins: tl.constexpr,
):
    """A x of a row, for some of its ranks."""
    row, first_rank = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile_ranks
    slot = tl.load(slots + row)
    if slot < 0:
        return
    rank = tl.load(ranks + slot)
    if first_rank >= rank:
        return
    places, ins = first_rank + tl.arange(0, tile_ranks), tl.arange(0, tile_ins)
    there = places < rank
    factors = a + (slot * max_rank + places) * n_in
    total = tl.zeros([tile_ranks, tile_ins], tl.float32)
    for first in range(0, n_in, tile_ins):
        left = first + ins < n_in
        numbers = tl.load(x + row * x_stride + first + ins, mask=left, other=0.0).to(tl.float32)
        ours = tl.load(factors[:, None] + first + ins[None, :], mask=there[:, None] & left[None, :], other=0.0)
        total += ours.to(tl.float32) * numbers[None, :]
    tl.store(inner + row * max_rank + places, tl.sum(total, 1), mask=there)


@triton.jit(do_not_specialize=["y_stride", "n_out"])
def expand(
    inner,  # [n, max_rank] float32
    b,  # [n_slots, max_rank, n_out]
    ranks,  # [n_slots] int64
    slots,  # [n] int64; -1: no adapter
    y,  # [n, n_out], changed in place
    y_stride,
    n_out,
    max_rank: tl.constexpr,
    tile_ranks: tl.constexpr,
    tile_outs: tl.constexpr,
):
    """y + B inner of a row, for some of its outputs."""
    row, outs = tl.program_id(0).to(tl.int64), tl.program_id(1) * tile_outs + tl.arange(0, tile_outs)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    rank, there = tl.load(ranks + slot), outs < n_out
    total = tl.zeros([tile_outs], tl.float32)
    for first in range(0, rank, tile_ranks):
        places = first + tl.arange(0, tile_ranks)
        given = places < rank
        numbers = tl.load(inner + row * max_rank + places, mask=given, other=0.0)
        factors = b + (slot * max_rank + places) * n_out
        ours = tl.load(factors[:, None] + outs[None, :], mask=given[:, None] & there[None, :], other=0.0)
        total += tl.sum(ours.to(tl.float32) * numbers[:, None], 0)
    targets = y + row * y_stride + outs
    before = tl.load(targets, mask=there, other=0.0).to(tl.float32)
    tl.store(targets, (before + total).to(y.dtype.element_ty), mask=there)
