"""Products of a few rows with a dense weight, in Triton.

A program reads its outputs' weights once, in order of the inputs; sums are float32. Where a weight has too few outputs
to occupy a GPU, its inputs are divided into shares that depend on the weight alone, and the sums of the shares are
added up in order: a row's bits do not depend on the rows beside it.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # by NumPy, which has no bfloat16


@triton.jit(do_not_specialize=["n_rows"])
def product(
    x,  # [n_rows, n_in]
    weight,  # [n_out, n_in]
    bias,  # [n_out]
    out,  # [n_rows, n_out]; with several shares [n_shares, n_rows, n_out] float32, without the bias
    n_rows,  # at most tile_rows
    x_stride,
    n_out,
    n_in,
    share,  # inputs of a program, a multiple of tile_ins
    n_shares: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outs: tl.constexpr,
    tile_ins: tl.constexpr,
):
    """x W^T + bias of some outputs, or the part of it that one share of the inputs is."""
    rows, outs = tl.arange(0, tile_rows), tl.program_id(0) * tile_outs + tl.arange(0, tile_outs)
    present, there = rows < n_rows, outs < n_out
    ins = tl.program_id(1) * share + tl.arange(0, tile_ins)
    x_at = x + rows[:, None] * x_stride + ins[None, :]
    weight_at = weight + outs.to(tl.int64)[None, :] * n_in + ins[:, None]
    sums = tl.zeros((tile_rows, tile_outs), tl.float32)
    for start in range(0, share, tile_ins):
        of_rows = tl.load(x_at + start, mask=present[:, None], other=0.0)
        of_outs = tl.load(weight_at + start, mask=there[None, :], other=0.0)
        if _INTERPRETED:
            of_rows, of_outs = of_rows.to(tl.float32), of_outs.to(tl.float32)
        sums = tl.dot(of_rows, of_outs, sums, input_precision="ieee")
    if has_bias and n_shares == 1:
        sums += tl.load(bias + outs, mask=there, other=0.0).to(tl.float32)[None, :]
    out_at = out + (tl.program_id(1) * n_rows + rows)[:, None] * n_out + outs[None, :]
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=present[:, None] & there[None, :])


@triton.jit
def add_shares(
    parts,  # [n_shares, n_rows, n_out] float32
    bias,  # [n_out]
    out,  # [n_rows, n_out]
    n_out,
    stride,  # of a share
    n_shares: tl.constexpr,
    has_bias: tl.constexpr,
    n_columns: tl.constexpr,
):
    """The sum of a row's shares and the bias, in some columns."""
    columns = tl.program_id(1) * n_columns + tl.arange(0, n_columns)
    there, at = columns < n_out, tl.program_id(0) * n_out + columns
    sums = tl.load(parts + at, mask=there, other=0.0)
    for share in tl.static_range(1, n_shares):
        sums += tl.load(parts + share * stride + at, mask=there, other=0.0)
    if has_bias:
        sums += tl.load(bias + columns, mask=there, other=0.0).to(tl.float32)
    tl.store(out + at, sums.to(out.dtype.element_ty), mask=there)
