"""Products with weights whose numbers are codes of 4 or 8 bits, in Triton.

A number is (code - zero) * scale + offset, computed in float32 and rounded once to the dtype of the inputs: it is the
number that a dense weight would hold. Inputs are read in units of 64. The 4-bit codes of a unit are 32 bytes: the low
halves are its first 32 inputs, the high halves its last 32, so that both halves lie in one group each.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # by NumPy, which has no bfloat16


@triton.jit
def _numbers(
    codes,  # [n_outs, 32]
    group,
    outs,
    there,
    scale,
    zero,
    offset,
    n_groups: tl.constexpr,
    has_zero: tl.constexpr,
    has_offset: tl.constexpr,
):
    """The numbers of codes that lie in one group of each output, in float32."""
    numbers, places = codes.to(tl.float32), outs * n_groups + group
    if has_zero:
        numbers -= tl.load(zero + places, mask=there, other=0).to(tl.float32)[:, None]
    numbers *= tl.load(scale + places, mask=there, other=0.0).to(tl.float32)[:, None]
    if has_offset:
        numbers += tl.load(offset + places, mask=there, other=0.0).to(tl.float32)[:, None]
    return numbers


@triton.jit(do_not_specialize=["n_rows"])
def product(
    x,  # [n_rows, n_in]
    codes,  # [n_out, n_in / 2] uint8 of 4 bits, or [n_out, n_in] uint8, int8 or float8
    scale,  # [n_out, n_groups]
    zero,  # [n_out, n_groups] uint8
    offset,  # [n_out, n_groups]
    bias,  # [n_out]
    out,  # [n_rows, n_out]
    n_rows,
    x_stride,
    n_out,
    n_in: tl.constexpr,
    n_groups: tl.constexpr,
    group: tl.constexpr,  # inputs, a multiple of 32
    halves: tl.constexpr,  # codes have 4 bits
    has_zero: tl.constexpr,
    has_offset: tl.constexpr,
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outs: tl.constexpr,
):
    """x W^T + bias of a tile of rows and outputs; a program reads its outputs' codes once, in order of the inputs."""
    outs = tl.program_id(0) * tile_outs + tl.arange(0, tile_outs)
    rows = tl.program_id(1) * tile_rows + tl.arange(0, tile_rows)
    there, given = outs < n_out, rows < n_rows
    inputs = tl.arange(0, 32)
    outs = outs.to(tl.int64)
    row_places = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    width: tl.constexpr = n_in // 2 if halves else n_in
    code_places = codes + outs[:, None] * width + inputs[None, :]
    total = tl.zeros([tile_rows, tile_outs], tl.float32)
    for unit in range(n_in // 64):
        first = tl.load(row_places + unit * 64, mask=given[:, None], other=0.0)
        second = tl.load(row_places + unit * 64 + 32, mask=given[:, None], other=0.0)
        if halves:
            both = tl.load(code_places + unit * 32, mask=there[:, None], other=0)
            low, high = both & 15, both >> 4
        else:
            low = tl.load(code_places + unit * 64, mask=there[:, None], other=0.0)
            high = tl.load(code_places + unit * 64 + 32, mask=there[:, None], other=0.0)
        one = _numbers(low, unit * 64 // group, outs, there, scale, zero, offset, n_groups, has_zero, has_offset)
        other = _numbers(
            high, (unit * 64 + 32) // group, outs, there, scale, zero, offset, n_groups, has_zero, has_offset
        )
        one, other = one.to(x.dtype.element_ty), other.to(x.dtype.element_ty)
        if _INTERPRETED:
            first, second = first.to(tl.float32), second.to(tl.float32)
            one, other = one.to(tl.float32), other.to(tl.float32)
        total += tl.dot(first, tl.trans(one), input_precision="ieee")
        total += tl.dot(second, tl.trans(other), input_precision="ieee")
    if has_bias:
        total += tl.load(bias + outs, mask=there, other=0.0).to(tl.float32)[None, :]
    places = rows.to(tl.int64)[:, None] * n_out + outs[None, :]
    tl.store(out + places, total.to(out.dtype.element_ty), mask=given[:, None] & there[None, :])
