"""Counter-based Gumbel noise: a function of (seed, position, token id) only.

The argmax over tokens of `logit / temperature + noise` is a draw from the softmax (Gumbel-max). Since the noise
depends neither on the batch nor on the history, preemption, tensor parallelism, or a resume on another worker
cannot change a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

_ALMOST_ONE = 1.0 - 2.0**-24  # the largest float32 below 1; log1p(-1) would be infinite
_TO_UNIT = 2.0**-31
_CACHED = 1 << 17  # numbers of 4 bytes that fit a core's second-level cache with room for temporaries


def _signed(word: int, bits: int) -> int:
    return word - ((word >> (bits - 1)) << bits)


# Odd multipliers with good avalanche: 2**32 / golden ratio, and the finaliser of MurmurHash3.
_SPREAD, _MIX_1, _MIX_2 = (_signed(word, 32) for word in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
# Of SplitMix64.
_STEP, _STIR_1, _STIR_2 = (_signed(word, 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def row_words(seeds: Tensor, positions: Tensor) -> Tensor:
    """Hash each row's (seed, position), [n] int64 each, to two words: [n, 2] int32."""
    return _splitmix(_splitmix(seeds) ^ positions).view(torch.int32).view(-1, 2)


def _splitmix(x: Tensor) -> Tensor:
    """The mixing steps of SplitMix64: int64 wraps around, and masks make the shifts logical."""
    x = x + _STEP
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _STIR_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _STIR_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def gumbel(words: Tensor, token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32.

    `words` is [n, 2] from `row_words`; `token_ids` is integer, [m] (shared by all rows) or [n, m]; the result is
    [n, m].
    """
    n, m = len(words), token_ids.shape[-1]
    ids = token_ids.to(torch.int32).expand(n, m)
    if token_ids.device.type != "cpu" or n * m <= _CACHED:
        return _gumbel(words, ids)
    # A dozen passes are several times faster over parts that stay in the CPU's cache.
    rows = max(1, _CACHED // m)
    noise = torch.empty((n, m), dtype=torch.float32)
    for low in range(0, n, rows):
        noise[low : low + rows] = _gumbel(words[low : low + rows], ids[low : low + rows])
    return noise


def _gumbel(words: Tensor, ids: Tensor) -> Tensor:
    x = (ids * _SPREAD) ^ words[:, :1]  # [n, m]
    x ^= (x >> 16) & 0xFFFF  # int32 shifts keep the sign; the mask makes them logical
    x *= _MIX_1
    x += words[:, 1:]  # between the mixing steps, so that no row's noise is a permutation of another row's
    x ^= (x >> 13) & 0x7FFFF
    x *= _MIX_2
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    # The winners are near 0, where float32 and log1p are precise.
    uniform = x.to(torch.float32).add_(0.5).mul_(_TO_UNIT).clamp_(max=_ALMOST_ONE)
    exponential: Tensor = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()
