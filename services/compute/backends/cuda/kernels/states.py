"""Layers that keep a state for each sequence, in Triton: convolutions over the last tokens, and scans.

All take the segments of a step, each of another sequence: [n, 4] int64, the first row, the row after the last, the
row of the state and the row that gets a copy of it (-1: none). A segment whose state has a negative row is padding.
A program reads and writes parts of a state that no other program of its launch touches.
"""

import triton
import triton.language as tl
from triton.errors import TritonError as TritonError

# A logarithm of a decay: what decays further within a token is below the rounding of what comes after it.
_LEAST = tl.constexpr(-30.0)
_PRECISION = tl.constexpr("tf32")  # factors of products on tensor cores: 10 bits, bfloat16 has 7


@triton.jit
def _segment(segments):
    """The first row, the end, the state's row and the copy's row of this program's segment."""
    places = segments + 4 * tl.program_id(0)
    return tl.load(places), tl.load(places + 1), tl.load(places + 2), tl.load(places + 3)


@triton.jit
def _tile(rows, columns, height: tl.constexpr, width: tl.constexpr):
    """The places of a tile of this program's head in a state, and which of them are there."""
    places = (tl.program_id(1) * height + rows[:, None]) * width + columns[None, :]
    return places, (rows < height)[:, None] & (columns < width)[None, :]


@triton.jit
def _keep(state, row, copy, size: tl.constexpr, places, numbers, inside):
    """Store a tile in its state, and in the copy that the segment asks for."""
    tl.store(state + row * size + places, numbers, mask=inside)
    if copy >= 0:
        tl.store(state + copy * size + places, numbers, mask=inside)


@triton.jit(do_not_specialize=["x_stride"])
def convolve(
    segments,
    x,  # [n_rows, n_channels]
    x_stride,
    taps,  # [n_taps, n_channels] float32, oldest input first
    bias,  # [n_channels] float32
    state,  # [rows of the store, n_taps - 1, n_channels]
    out,  # [n_rows, n_channels] float32
    n_channels: tl.constexpr,
    n_taps: tl.constexpr,
    n_kept: tl.constexpr,  # n_taps - 1, padded to a power of two
    has_bias: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_channels: tl.constexpr,
):
    """The filters of a tile of channels over a segment, and the inputs that its state keeps."""
    first, end, row, copy = _segment(segments)
    if row < 0:
        return
    channels, rows = tl.program_id(1) * tile_channels + tl.arange(0, tile_channels), tl.arange(0, tile_rows)
    real = channels < n_channels
    old = state + row * (n_taps - 1) * n_channels + channels
    for start in range(first, end, tile_rows):
        places = start + rows
        total = tl.zeros([tile_rows, tile_channels], tl.float32)
        for tap in tl.static_range(n_taps):
            sources = places - (n_taps - 1 - tap)
            inside, before = (sources >= first) & (places < end), sources < first
            of_step = tl.load(
                x + sources[:, None] * x_stride + channels[None, :], mask=inside[:, None] & real[None, :], other=0.0
            )
            of_state = tl.load(
                old[None, :] + (sources - first + n_taps - 1)[:, None] * n_channels,
                mask=before[:, None] & real[None, :],
                other=0.0,
            )
            factors = tl.load(taps + tap * n_channels + channels, mask=real, other=0.0)
            total += (of_step.to(tl.float32) + of_state.to(tl.float32)) * factors[None, :]
        if has_bias:
            total += tl.load(bias + channels, mask=real, other=0.0)[None, :]
        targets = out + places[:, None] * n_channels + channels[None, :]
        tl.store(targets, total, mask=(places < end)[:, None] & real[None, :])
    numbers = tl.arange(0, n_kept)
    sources, there = end - (n_taps - 1) + numbers, (numbers < n_taps - 1)[:, None] & real[None, :]
    of_step = tl.load(
        x + sources[:, None] * x_stride + channels[None, :], mask=(sources >= first)[:, None] & there, other=0.0
    )
    of_state = tl.load(
        old[None, :] + (sources - first + n_taps - 1)[:, None] * n_channels,
        mask=(sources < first)[:, None] & there,
        other=0.0,
    )
    newest = (of_step.to(tl.float32) + of_state.to(tl.float32)).to(state.dtype.element_ty)
    tl.debug_barrier()  # all threads have read the state
    tl.store(old[None, :] + numbers[:, None] * n_channels, newest, mask=there)
    if copy >= 0:
        places = state + (copy * (n_taps - 1) + numbers[:, None]) * n_channels + channels[None, :]
        tl.store(places, newest, mask=there)


@triton.jit
def scan(
    segments,
    inputs,  # [n_rows, n_heads, height], as all that follow in float32
    b,  # [n_rows, n_heads, width]
    c,  # [n_rows, n_heads, width]
    decay,  # [n_rows, n_heads], with `own` [n_rows, n_heads, width], with `has_rates` [n_rows, n_heads, height]
    rate,  # [n_rows, n_heads]
    rates,  # [n_heads, height, width]
    state,  # [rows of the store, n_heads, height, width]
    out,  # [n_rows, n_heads, height]
    n_heads: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    n_columns: tl.constexpr,  # width, padded to a power of two
    tile_height: tl.constexpr,
    own: tl.constexpr,
    has_rate: tl.constexpr,
    has_rates: tl.constexpr,
):
    """Token by token: a tile of the state of a head stays in registers, and the sums have the order of its numbers."""
    first, end, row, copy = _segment(segments)
    if row < 0:
        return
    head, size = tl.program_id(1), n_heads * height * width
    rows, columns = tl.program_id(2) * tile_height + tl.arange(0, tile_height), tl.arange(0, n_columns)
    there, real = rows < height, columns < width
    places, inside = _tile(rows, columns, height, width)
    numbers = tl.load(state + row * size + places, mask=inside, other=0.0)
    if has_rates:
        own_rates = tl.load(rates + places, mask=inside, other=0.0)
    for token in range(first, end):
        at = token * n_heads + head
        x = tl.load(inputs + at * height + rows, mask=there, other=0.0)
        key = tl.load(b + at * width + columns, mask=real, other=0.0)[None, :]
        query = tl.load(c + at * width + columns, mask=real, other=0.0)[None, :]
        if has_rates:
            steps = tl.load(decay + at * height + rows, mask=there, other=0.0)
            numbers *= tl.exp(steps[:, None] * own_rates)
        elif own:
            numbers *= tl.load(decay + at * width + columns, mask=real, other=0.0)[None, :]
        else:
            numbers *= tl.load(decay + at)
        if has_rate:
            x = (x - tl.sum(numbers * key, 1)) * tl.load(rate + at)
        numbers += x[:, None] * key
        tl.store(out + at * height + rows, tl.sum(numbers * query, 1), mask=there)
    _keep(state, row, copy, size, places, numbers, inside)


@triton.jit
def _logarithm(decay):
    """The logarithm, at least `_LEAST`; not a number stays none."""
    exact = tl.log(decay)
    return tl.where(exact < _LEAST, _LEAST, exact)


@triton.jit
def _decayed_products(query, key, total, n_tokens: tl.constexpr):
    """The products of queries, and of keys, with the keys of earlier tokens, whose columns have decayed since."""
    scores, keys = tl.zeros([n_tokens, n_tokens], tl.float32), tl.zeros([n_tokens, n_tokens], tl.float32)
    steps = tl.arange(0, n_tokens)
    for token in range(n_tokens):
        this = (steps == token)[:, None]
        of_token, begin = tl.sum(tl.where(this, key, 0.0), 0), tl.sum(tl.where(this, total, 0.0), 0)
        weighted = of_token[None, :] * tl.exp(tl.minimum(total - begin[None, :], 0.0))
        column = (steps == token)[None, :]
        scores = tl.where(column, tl.sum(query * weighted, 1)[:, None], scores)
        keys = tl.where(column, tl.sum(key * weighted, 1)[:, None], keys)
    return scores, keys


@triton.jit
def chunks(
    segments,
    inputs,  # as in `scan`
    b,
    c,
    decay,
    rate,
    state,
    out,
    n_heads: tl.constexpr,
    height: tl.constexpr,
    width: tl.constexpr,
    n_columns: tl.constexpr,
    tile_height: tl.constexpr,
    n_tokens: tl.constexpr,  # tokens of a chunk
    own: tl.constexpr,
    has_rate: tl.constexpr,
):
    """The same a chunk of tokens at a time, by products of matrices.

    With G the products of decays from the chunk's begin, the state S before it and u what each token adds,
    y_t = S G_t c_t + sum over s <= t of u_s (b_s G_t / G_s) c_t, where G_t / G_s is at most 1 (arXiv:2405.21060).
    With rates, u solves u_t = rate_t (x_t - S G_t b_t - sum over s < t of u_s (b_s G_t / G_s) b_t), one token after
    another (arXiv:2412.06464).
    """
    first, end, row, copy = _segment(segments)
    if row < 0:
        return
    head, size = tl.program_id(1), n_heads * height * width
    rows, columns = tl.program_id(2) * tile_height + tl.arange(0, tile_height), tl.arange(0, n_columns)
    there, real = rows < height, columns < width
    places, inside = _tile(rows, columns, height, width)
    numbers = tl.load(state + row * size + places, mask=inside, other=0.0)
    steps = tl.arange(0, n_tokens)
    upto, earlier = steps[:, None] >= steps[None, :], steps[:, None] > steps[None, :]
    for start in range(first, end, n_tokens):
        given = start + steps < end
        at = (start + steps) * n_heads + head
        u = tl.load(inputs + at[:, None] * height + rows[None, :], mask=given[:, None] & there[None, :], other=0.0)
        within = given[:, None] & real[None, :]
        key = tl.load(b + at[:, None] * width + columns[None, :], mask=within, other=0.0)
        query = tl.load(c + at[:, None] * width + columns[None, :], mask=within, other=0.0)
        if own:
            logs = _logarithm(tl.load(decay + at[:, None] * width + columns[None, :], mask=within, other=1.0))
            total = tl.cumsum(logs, 0)
            scores, keys = _decayed_products(query, key, total, n_tokens)
            whole = tl.sum(logs, 0)[None, :]
            grown, rest, passed = tl.exp(total), tl.exp(whole - total), tl.exp(whole)
            query, corrected, lasting, added = query * grown, key * grown, key * rest, 1.0
            grown = 1.0
        else:
            logs = _logarithm(tl.load(decay + at, mask=given, other=1.0))
            total = tl.cumsum(logs, 0)
            between = tl.exp(tl.where(upto, total[:, None] - total[None, :], 0.0))
            scores = tl.dot(query, tl.trans(key), input_precision=_PRECISION) * between
            whole = tl.sum(logs, 0)
            grown, added, passed = tl.exp(total)[:, None], tl.exp(whole - total)[:, None], tl.exp(whole)
            corrected, lasting = key, key
            if has_rate:
                keys = tl.dot(key, tl.trans(key), input_precision=_PRECISION) * between
        y = tl.dot(query, tl.trans(numbers), input_precision=_PRECISION) * grown
        if has_rate:
            of_token = tl.load(rate + at, mask=given, other=0.0)[:, None]
            u = (u - tl.dot(corrected, tl.trans(numbers), input_precision=_PRECISION) * grown) * of_token
            keys = tl.where(earlier, keys, 0.0) * of_token
            for token in range(1, n_tokens):
                this = (steps == token)[:, None]
                factors = tl.sum(tl.where(this, keys, 0.0), 0)
                u = tl.where(this, u - tl.sum(factors[:, None] * u, 0)[None, :], u)
        y += tl.dot(tl.where(upto, scores, 0.0), u, input_precision=_PRECISION)
        numbers = numbers * passed + tl.dot(tl.trans(u * added), lasting, input_precision=_PRECISION)
        tl.store(out + at[:, None] * height + rows[None, :], y, mask=given[:, None] & there[None, :])
    _keep(state, row, copy, size, places, numbers, inside)
