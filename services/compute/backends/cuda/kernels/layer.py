"""The small operations of a layer in Triton, one launch each: they cost their launches, not their bytes.

All compute in float32 and round once. Rows are numbers of any float dtype, whose last dimension is contiguous.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

# Of `noise.py`.
_SPREAD, _MIX_1, _MIX_2 = (tl.constexpr(word) for word in (-1640531535, -2048144789, -1028477387))
_STEP, _STIR_1, _STIR_2 = (
    tl.constexpr(word) for word in (-7046029254386353131, -4658895280553007687, -7723592293110705685)
)
_TO_UNIT = tl.constexpr(2.0**-31)
_ALMOST_ONE = tl.constexpr(1.0 - 2.0**-24)
_LOWEST = tl.constexpr(-(1 << 63))  # less than the key of any token


@triton.jit
def norm(
    x,  # [n, groups, size]
    added,  # [n, size], if there is one group; unused without `adds`
    weight,  # [groups, size] float32, or [size] for all groups
    out,  # [n, groups, size]
    x_stride,
    group_stride,
    out_stride,
    out_group_stride,
    scale,
    eps,
    groups: tl.constexpr,
    size: tl.constexpr,
    n_columns: tl.constexpr,
    weight_stride: tl.constexpr,
    adds: tl.constexpr,
):
    """RMS norm of a program's row; with `adds`, first add scale * added to `x`, in place."""
    row, group = tl.program_id(0).to(tl.int64) // groups, tl.program_id(0) % groups
    columns = tl.arange(0, n_columns)
    real = columns < size
    places = x + row * x_stride + group * group_stride + columns
    numbers = tl.load(places, mask=real, other=0.0).to(tl.float32)
    if adds:
        numbers += scale * tl.load(added + row * size + columns, mask=real, other=0.0).to(tl.float32)
        rounded = numbers.to(x.dtype.element_ty)
        tl.store(places, rounded, mask=real)
        numbers = rounded.to(tl.float32)
    mean = tl.sum(numbers * numbers, 0) / size
    factors = tl.load(weight + group * weight_stride + columns, mask=real, other=0.0)
    normed = numbers / tl.sqrt(mean + eps) * factors
    tl.store(out + row * out_stride + group * out_group_stride + columns, normed.to(out.dtype.element_ty), mask=real)


@triton.jit
def gate(gate_up, out, size, n_columns: tl.constexpr, name: tl.constexpr):
    """act(gate) * up of a part of a row [2 * size]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * n_columns + tl.arange(0, n_columns)
    real = columns < size
    x = tl.load(gate_up + row * 2 * size + columns, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + columns, mask=real, other=0.0).to(tl.float32)
    if name == "silu":
        x = x / (1 + tl.exp(-x))
    elif name == "gelu_tanh":
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))  # 2 sqrt(2 / pi): tanh by exp
    else:
        tl.static_assert(name == "gelu")
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    tl.store(out + row * size + columns, (x * up).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["n_written"])
def rotate(
    heads,  # [n, n_heads, head_dim]
    cos,  # [max_positions, half] float32
    sin,
    positions,  # [n] int64
    table,  # [n_slots, (n_heads - n_queries) * head_dim] of the cache
    slots,  # [n_written] int64
    row_stride,
    n_written,
    n_queries: tl.constexpr,
    n_rotated: tl.constexpr,
    n_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    n_pairs: tl.constexpr,
    n_rest: tl.constexpr,
):
    """Rotate a query in place; rotate a key and write it to the table, or write a value there."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pairs = tl.arange(0, n_pairs)
    both = pairs < half
    angle = tl.load(positions + row) * half + pairs
    c, s = tl.load(cos + angle, mask=both, other=1.0), tl.load(sin + angle, mask=both, other=0.0)
    here = heads + row * row_stride + head * head_dim
    first = tl.load(here + pairs, mask=both, other=0.0).to(tl.float32)
    second = tl.load(here + half + pairs, mask=both, other=0.0).to(tl.float32)
    turns = head < n_rotated
    left = tl.where(turns, first * c - second * s, first).to(heads.dtype.element_ty)
    right = tl.where(turns, second * c + first * s, second).to(heads.dtype.element_ty)
    if head < n_queries:
        tl.store(here + pairs, left, mask=both)
        tl.store(here + half + pairs, right, mask=both)
    elif row < n_written:
        there = table + (tl.load(slots + row) * (n_heads - n_queries) + head - n_queries) * head_dim
        tl.store(there + pairs, left, mask=both)
        tl.store(there + half + pairs, right, mask=both)
        if n_rest:
            rest = 2 * half + tl.arange(0, n_rest)
            beyond = rest < head_dim
            tl.store(there + rest, tl.load(here + rest, mask=beyond, other=0.0), mask=beyond)


@triton.jit
def _splitmix(x):
    """Mix 64 bits, by the integers of `noise.py`."""
    x += _STEP
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _STIR_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _STIR_2
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit
def _gumbel(ids, first_word, second_word):
    """Noise of (seed, position, token), by the integers of `noise.py`."""
    x = (ids * _SPREAD) ^ first_word
    x ^= (x >> 16) & 0xFFFF
    x = x * _MIX_1 + second_word
    x ^= (x >> 13) & 0x7FFFF
    x *= _MIX_2
    x ^= (x >> 16) & 0xFFFF
    uniform = tl.minimum(((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * _TO_UNIT, _ALMOST_ONE)
    rest = 1 - uniform
    # log1p(-uniform): the error of rounding `rest` is divided out (Kahan).
    log = tl.where(rest == 1, -uniform, tl.log(rest) * (-uniform / (rest - 1 + (rest == 1))))
    return -tl.log(-log)


@triton.jit
def draw(
    logits,  # [n, n_columns] float32
    temperature,  # [n] float32; 0: greedy
    seeds,  # [n] int64
    positions,  # [n] int64
    keys,  # [n, n_parts] int64
    row_stride,
    first_id,
    n_columns,
    n_parts,
    part: tl.constexpr,
):
    """The key of the best score in a part of a row's columns."""
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = number * part + tl.arange(0, part)
    real = columns < n_columns
    score = tl.load(logits + row * row_stride + columns, mask=real, other=float("-inf"))
    ids = first_id + columns
    warmth = tl.load(temperature + row)
    if warmth > 0:
        word = _splitmix(_splitmix(tl.load(seeds + row)) ^ tl.load(positions + row))
        score = score / warmth + _gumbel(ids, word.to(tl.int32), (word >> 32).to(tl.int32))
    score = tl.where(score != score, float("inf"), score)  # as in `keys.py`
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)  # -0.0 and 0.0 tie
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = (ordered.to(tl.int64) << 32) | (0xFFFFFFFF - ids.to(tl.int64))
    tl.store(keys + row * n_parts + number, tl.max(tl.where(real, key, _LOWEST), 0))
