"""Products of rows with the weights of the experts that they are sent to, in Triton.

Rows are sorted by expert; `starts` says where each expert's begin. How many tiles an expert's rows fill is known on the
device alone: each program finds its expert and rows from `starts`, and programs without rows end at once.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # by NumPy, which has no bfloat16


@triton.jit(do_not_specialize=["n_active"])
def product(
    x,  # [n, n_in], or [n * n_active, n_in] sorted
    order,  # [n * n_active] int64: the place of each sorted row
    starts,  # [n_experts + 1] int64: of each expert's sorted rows
    weight,  # [n_experts, n_out, n_in]
    bias,  # [n_experts, n_out]
    out,  # [n * n_active, n_out], sorted, or by place
    n_active,
    n_out,
    n_in: tl.constexpr,
    n_experts: tl.constexpr,
    n_bounds: tl.constexpr,  # n_experts, padded to a power of two
    gathers: tl.constexpr,  # rows of x are those of their places, else sorted
    scatters: tl.constexpr,  # rows of out are places, else sorted
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_outs: tl.constexpr,
    tile_ins: tl.constexpr,
):
    """x W^T + bias of a tile of one expert's rows and a tile of outputs."""
    tile = tl.program_id(0)
    numbers = tl.arange(0, n_bounds)
    real = numbers < n_experts
    begins, ends = tl.load(starts + numbers, mask=real, other=0), tl.load(starts + numbers + 1, mask=real, other=0)
    tiles = (ends - begins + tile_rows - 1) // tile_rows
    upto = tl.cumsum(tiles, 0)
    if tile >= tl.sum(tiles, 0):
        return
    expert = tl.sum((real & (upto <= tile)).to(tl.int32), 0)
    ours = numbers == expert
    begin, end = tl.sum(tl.where(ours, begins, 0), 0), tl.sum(tl.where(ours, ends, 0), 0)
    rows = begin + (tile - tl.sum(tl.where(ours, upto - tiles, 0), 0)) * tile_rows + tl.arange(0, tile_rows)
    given = rows < end
    places = tl.load(order + rows, mask=given, other=0)
    sources = places // n_active if gathers else rows
    outs = tl.program_id(1) * tile_outs + tl.arange(0, tile_outs)
    there, ins = outs < n_out, tl.arange(0, tile_ins)
    of_expert = (expert.to(tl.int64) * n_out + outs) * n_in
    total = tl.zeros([tile_rows, tile_outs], tl.float32)
    for first in range(0, n_in, tile_ins):
        left = first + ins < n_in
        a = tl.load(x + sources[:, None] * n_in + first + ins[None, :], mask=given[:, None] & left[None, :], other=0.0)
        w = tl.load(weight + of_expert[:, None] + first + ins[None, :], mask=there[:, None] & left[None, :], other=0.0)
        if _INTERPRETED:
            a, w = a.to(tl.float32), w.to(tl.float32)
        total += tl.dot(a, tl.trans(w), input_precision="ieee")
    if has_bias:
        added = tl.load(bias + expert.to(tl.int64) * n_out + outs, mask=there, other=0.0)
        total += added.to(tl.float32)[None, :]
    targets = places if scatters else rows
    tl.store(
        out + targets[:, None] * n_out + outs[None, :],
        total.to(out.dtype.element_ty),
        mask=given[:, None] & there[None, :],
    )
