"""Keys and values on their way to a cache of 8-bit codes, in Triton: rotated, coded and written by one launch.

The codes and scales are those of `ScaledCodes.write`, bit by bit: the same float32 operations in the same order. So the
launch forbids fused multiply-adds, and roundings are made of additions and of integers, which no device rounds in
another way; an 8-bit float is also stored by GPUs that have no instruction for it.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

_EXPONENT, _MAGNITUDE = tl.constexpr(0x7F800000), tl.constexpr(0x7FFFFFFF)  # bit masks of a float32
_LEAST_NORMAL = tl.constexpr(0x00800000)
_NAN_SCALE = tl.constexpr(0x7FC00000)
_TO_INTEGER = tl.constexpr(1.5 * 2.0**23)  # added and taken away again, it leaves no digits behind the point
_LEAST_EXPONENT = tl.constexpr(121 << 23)  # the bits of the next
_LEAST_NORMAL_CODE = tl.constexpr(2.0**-6)  # smallest normal 8-bit float; smaller ones are multiples of 2^-9
_UNIT = tl.constexpr(2.0**9)
_REBIASED = tl.constexpr(120 << 3)  # exponents of float32 are larger by 127 - 7, behind 3 bits of a code


@triton.jit
def _spread(x, factor, n_dims: tl.constexpr, n_levels: tl.constexpr):
    """`rotated` of a key [n_dims] in float32: sums and differences of numbers that are 1, 2, 4 ... apart."""
    x = x * factor
    for level in tl.static_range(n_levels):
        pairs = tl.permute(tl.reshape(x, (n_dims >> (level + 1), 2, 1 << level)), (0, 2, 1))
        a, b = tl.split(pairs)
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (n_dims,))
    return x


@triton.jit
def _scale(x, per_code):
    """The bits of a head's scale: a float32 whose last 16 bits are 0. Not finite if a number of `x` is not."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE, 0)  # as integers NaN is the largest
    bits = (largest.to(tl.float32, bitcast=True) * per_code).to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # to bfloat16, half to even
    rounded = tl.where(bits > _EXPONENT, _NAN_SCALE, rounded)
    return tl.where(rounded < _LEAST_NORMAL, 0, rounded)


@triton.jit
def _code(x, dtype: tl.constexpr):
    """The nearest codes of numbers that are no larger than the largest code, half to even: bytes in int32."""
    if dtype == "float8_e4m3fn":
        exponent = x.to(tl.int32, bitcast=True) & _EXPONENT
        exponent = tl.maximum(exponent, _LEAST_EXPONENT)
        # 1.5 * 2^23 steps of the codes next to `x`, which are an eighth of its power of two.
        steps = ((exponent + (20 << 23)) | (1 << 22)).to(tl.float32, bitcast=True)
        size = tl.abs((x + steps) - steps)
        small, normal = (size * _UNIT).to(tl.int32), (size.to(tl.int32, bitcast=True) >> 20) - _REBIASED
        code = tl.where(size < _LEAST_NORMAL_CODE, small, normal)
        return code | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
    return ((x + _TO_INTEGER) - _TO_INTEGER).to(tl.int32)


@triton.jit(do_not_specialize=["n_written"])
def write(
    heads,  # [n, n_heads, head_dim]: queries, keys, values
    cos,  # [max_positions, half] float32
    sin,
    positions,  # [n] int64
    codes,  # [n_blocks, n_heads - n_queries, run] int8: a run is codes [block_tokens, head_dim], scales [block_tokens]
    scales,  # the same memory as int16
    slots,  # [n_written] int64
    row_stride,
    n_written,
    factor,  # factor of a key before it is spread
    per_code,  # 1 / largest
    largest: tl.constexpr,
    codes_dtype: tl.constexpr,
    n_queries: tl.constexpr,
    n_rotated: tl.constexpr,
    n_heads: tl.constexpr,
    head_dim: tl.constexpr,
    half: tl.constexpr,
    n_pairs: tl.constexpr,
    n_dims: tl.constexpr,
    n_levels: tl.constexpr,
    block_tokens: tl.constexpr,
):
    """Rotate a query or a key in place; code a key or a value and write it to its slot."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = heads + row * row_stride + head * head_dim
    if n_rotated > 0 and head < n_rotated:
        pairs = tl.arange(0, n_pairs)
        both = pairs < half
        angle = tl.load(positions + row) * half + pairs
        c, s = tl.load(cos + angle, mask=both, other=1.0), tl.load(sin + angle, mask=both, other=0.0)
        first = tl.load(here + pairs, mask=both, other=0.0).to(tl.float32)
        second = tl.load(here + half + pairs, mask=both, other=0.0).to(tl.float32)
        tl.store(here + pairs, (first * c - second * s).to(heads.dtype.element_ty), mask=both)
        tl.store(here + half + pairs, (second * c + first * s).to(heads.dtype.element_ty), mask=both)
    if head >= n_queries and row < n_written:
        tl.debug_barrier()  # the head is read by other threads than wrote it
        dims = tl.arange(0, n_dims)
        real = dims < head_dim
        x = tl.load(here + dims, mask=real, other=0.0).to(tl.float32)
        if head < (n_queries + n_heads) // 2:  # a key
            x = _spread(x, factor, n_dims, n_levels)
        bits = _scale(x, per_code)
        usable = (bits > 0) & (bits < _EXPONENT)
        inverse = tl.div_rn(1.0, tl.where(usable, bits, _NAN_SCALE).to(tl.float32, bitcast=True))
        scaled = tl.where(usable, x * inverse, 0.0)
        scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
        slot = tl.load(slots + row)
        block, place = slot // block_tokens, slot % block_tokens
        run: tl.constexpr = block_tokens * (head_dim + 2)
        start = (block * (n_heads - n_queries) + head - n_queries) * run
        tl.store(codes + start + place * head_dim + dims, _code(scaled, codes_dtype).to(tl.int8), mask=real)
        tl.store(scales + (start + block_tokens * head_dim) // 2 + place, (bits >> 16).to(tl.int16))
