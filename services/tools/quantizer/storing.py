"""Quantized layers as the tensors and the configuration of compressed-tensors."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from services.compute.model.layout import WORD_BITS
from services.tools.quantizer.grid import QuantizedWeight
from services.tools.quantizer.scheme import Scheme
from services.tools.quantizer.target import QuantizationTarget, StoredRows


def store_linears(linears: Mapping[str, QuantizedWeight], target: QuantizationTarget) -> dict[str, Tensor]:
    """Return the stored tensors of linear layers by name; `target` may fuse projections."""
    modules: dict[str, list[tuple[StoredRows, QuantizedWeight]]] = defaultdict(list)
    for key, made in linears.items():
        modules[target.module(key)].append((target.place(key, len(made.codes)), made))
    stored: dict[str, Tensor] = {}
    for module, parts in modules.items():
        scheme = parts[0][1].grid.scheme
        codes, scale, zero = (
            _assembled([(place, part.cpu()) for place, part in zip((p for p, _ in parts), column, strict=True)])
            for column in zip(*((made.codes, made.grid.scale, made.grid.zero) for _, made in parts), strict=True)
        )
        named = _tensors(scheme, codes, scale, zero)
        stored |= {f"{module}.{suffix}": tensor.contiguous() for suffix, tensor in named.items()}
    return stored


def store_whole(tensors: Mapping[str, Tensor], target: QuantizationTarget) -> dict[str, Tensor]:
    """Return the stored tensors of vectors, and of matrices that are not quantized, by name."""
    parts: dict[str, list[tuple[StoredRows, Tensor]]] = defaultdict(list)
    for key, tensor in tensors.items():
        place = target.place(key, len(tensor))
        parts[place.name].append((place, tensor.cpu()))
    return {name: _assembled(blocks) for name, blocks in parts.items()}


def _assembled(parts: list[tuple[StoredRows, Tensor]]) -> Tensor:
    """Return a stored tensor from the rows of its parts."""
    n_stored, like = parts[0][0].n_stored, parts[0][1]
    assert sum(len(place.rows) for place, _ in parts) == n_stored, f"{parts[0][0].name}: parts are missing"
    whole = like.new_empty((n_stored, *like.shape[1:]))
    for place, part in parts:
        whole[place.rows] = part
    return whole


def _tensors(scheme: Scheme, codes: Tensor, scale: Tensor, zero: Tensor) -> dict[str, Tensor]:
    """Return a module's tensors by suffix; `codes` [n_out, n_in] uint8."""
    zeros = {} if scheme.symmetric else {"weight_zero_point": zero}
    if scheme.stored_as == "int-quantized":
        signed = {"weight": codes, **zeros}
        shifted = {name: (value.short() - scheme.middle).to(torch.int8) for name, value in signed.items()}
        return {**shifted, "weight_scale": scale}
    packed = {"weight_packed": pack(codes, scheme.bits)}
    if zeros:
        packed["weight_zero_point"] = pack(zero.to(torch.uint8).t(), scheme.bits).t()
    return {**packed, "weight_scale": scale, "weight_shape": torch.tensor(codes.shape)}


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return `codes` [n, size] uint8 in words of 32 bits, first code lowest: [n, ceil(size / per word)] int32."""
    per_word = WORD_BITS // bits
    padded = F.pad(codes.to(torch.int64), (0, -codes.shape[1] % per_word))
    shifts = torch.arange(per_word) * bits
    words = (padded.view(len(codes), -1, per_word) << shifts).sum(dim=-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _targets(modules: list[str]) -> list[str]:
    """Return patterns of the modules' names, which have a prefix if the model is a part of another one."""
    return [rf"re:(.*\.)?{re.escape(module)}$" for module in modules]


def quantization_config(schemes: Mapping[str, Scheme], usual: Scheme, ignored: Iterable[str]) -> dict[str, Any]:
    """Return `quantization_config`: `schemes` by module; all modules of the `usual` one are named by their class."""
    by_scheme: dict[Scheme, list[str]] = defaultdict(list)
    for module, scheme in schemes.items():
        by_scheme[scheme].append(module)
    ordered = sorted(by_scheme, key=lambda scheme: scheme != usual)
    groups = [scheme.group_config(["Linear"] if scheme == usual else _targets(by_scheme[scheme])) for scheme in ordered]
    formats = list(dict.fromkeys(scheme.stored_as for scheme in ordered))
    return {
        "quant_method": "compressed-tensors",
        "format": formats[0] if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
