"""A float and a token id in one int64 whose order is (value descending, id ascending).

Distinct ids give distinct keys, so a maximum, a top-k or a merge over ranks has exactly one answer: ties resolve
to the lowest token id, however the vocabulary is split. NaN counts as +inf, so a row with NaN or +inf has a best key
whose value is not finite, and draws no token.

    key = ordered(value) << 32 | (2**32 - 1 - token id)
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.token_logprobs import NO_TOKEN

_LOW = 0xFFFFFFFF
_MAGNITUDE = 0x7FFFFFFF
_LEAST_FINITE, _INFINITE = -0x7F800000 << 32, 0x7F800000 << 32


def pack(values: Tensor, token_ids: Tensor) -> Tensor:
    """Return the keys of float32 `values` and int64 `token_ids` (shapes broadcast)."""
    values = (values + 0.0).nan_to_num_(torch.inf, torch.inf, -torch.inf)  # + 0.0: -0.0 becomes +0.0, and they tie
    bits = values.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & _MAGNITUDE)
    return (ordered.to(torch.int64) << 32) | (_LOW - token_ids)


def token_ids_of(keys: Tensor) -> Tensor:
    """Return the token ids, int64."""
    return _LOW - (keys & _LOW)


def drawn_ids(best: Tensor) -> Tensor:
    """Return the token ids of rows' best keys, int64; NO_TOKEN where the best value is not finite."""
    return torch.where((best >= _LEAST_FINITE) & (best < _INFINITE), token_ids_of(best), NO_TOKEN)


def values_of(keys: Tensor) -> Tensor:
    """Return the values, float32."""
    ordered = (keys >> 32).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & _MAGNITUDE)).view(torch.float32)


def pack_bits(values: Tensor) -> Tensor:
    """Return float32 `values` as int64, to gather them together with keys."""
    return values.view(torch.int32).to(torch.int64)


def unpack_bits(bits: Tensor) -> Tensor:
    """Inverse of `pack_bits`."""
    return bits.to(torch.int32).view(torch.float32)
