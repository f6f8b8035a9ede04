"""Counter-based Gumbel noise: a function of (seed, position, token id) only.

The argmax over tokens of `logit / temperature + noise` is a draw from the softmax (Gumbel-max). Since the noise
depends neither on the batch nor on the history, preemption, tensor parallelism, or a resume on another worker
cannot change a sample.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALMOST_ONE = 1.0 - 2.0**-24  # the largest float32 below 1; log1p(-1) would be infinite
_TO_UNIT = 2.0**-31
_CACHED = 1 << 17  # numbers of 4 bytes that fit a core's second-level cache with room for temporaries


def _signed(word: int) -> int:
    return word - ((word >> 31) << 32)


# Odd multipliers with good avalanche: 2**32 / golden ratio, and the finaliser of MurmurHash3.
_SPREAD, _MIX_1, _MIX_2 = _signed(0x9E3779B1), _signed(0x85EBCA6B), _signed(0xC2B2AE35)


def scale(logits: Tensor, temperature: NDArray[np.float32]) -> Tensor:
    """Return `logits` [n, m] / `temperature` [n]; temperatures are above 0."""
    return logits / torch.from_numpy(temperature).to(logits.device, non_blocking=True).unsqueeze(-1)


def row_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.int32]:
    """Hash each row's (seed, position) to two words: [n] and [n] -> [n, 2]. Mixing steps of SplitMix64."""
    x = _splitmix(seeds.astype(np.uint64))
    x = _splitmix(x ^ positions.astype(np.uint64))
    return x.view(np.int32).reshape(-1, 2)


def _splitmix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = x + np.uint64(0x9E3779B97F4A7C15)  # NumPy arrays wrap around without a warning
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel(keys: NDArray[np.int32], token_ids: Tensor) -> Tensor:
    """Return standard Gumbel noise, float32.

    `keys` is [n, 2] from `row_keys`; `token_ids` is integer, [m] (shared by all rows) or [n, m]; the result is [n, m].
    """
    n, m = len(keys), token_ids.shape[-1]
    words = torch.from_numpy(keys).to(token_ids.device, non_blocking=True)  # [n, 2]
    ids = token_ids.to(torch.int32).expand(n, m)
    if token_ids.device.type != "cpu" or n * m <= _CACHED:
        return _gumbel(words, ids)
    # A dozen passes are several times faster over parts that stay in the CPU's cache.
    rows = max(1, _CACHED // m)
    noise = torch.empty((n, m), dtype=torch.float32)
    for low in range(0, n, rows):
        noise[low : low + rows] = _gumbel(words[low : low + rows], ids[low : low + rows])
    return noise


def _gumbel(keys: Tensor, ids: Tensor) -> Tensor:
    x = (ids * _SPREAD) ^ keys[:, :1]  # [n, m]
    x ^= (x >> 16) & 0xFFFF  # int32 shifts keep the sign; the mask makes them logical
    x *= _MIX_1
    x += keys[:, 1:]  # between the mixing steps, so that no row's noise is a permutation of another row's
    x ^= (x >> 13) & 0x7FFFF
    x *= _MIX_2
    x ^= (x >> 16) & 0xFFFF
    x &= 0x7FFFFFFF
    # The winners are near 0, where float32 and log1p are precise.
    uniform = x.to(torch.float32).add_(0.5).mul_(_TO_UNIT).clamp_(max=_ALMOST_ONE)
    exponential: Tensor = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()
