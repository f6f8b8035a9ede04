"""Layers whose weights stay codes of 4 or 8 bits on a GPU: a half or a quarter of the bytes to hold and to read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.weights import Dense, Grouped, PerChannel, Stacked, Weight, read_rows

_UNIT = 64  # inputs that the kernel reads at a time
_LEAST_GROUP = 32
_BAND = 1024  # rows packed at a time, to bound the memory besides the packed weight
_FEW_ROWS = 16  # rows of the smallest product on tensor cores
_NO_FLOAT8 = (8, 9)  # GPUs below this capability cannot convert 8-bit floats


def converts_float8(device: torch.device) -> bool:
    """Whether kernels for `device` can read 8-bit floats."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= _NO_FLOAT8


def stays_codes(weight: Weight, *, float8: bool) -> bool:
    """Whether the kernel multiplies with `weight` as it is stored: groups in order, of whole halves of units."""
    n_out, n_in = weight.shape
    if isinstance(weight, Dense) or not n_out or n_in % _UNIT:
        return False
    head = next(_bands(weight, 1))
    size = n_in // head.scale.shape[1]
    regular = size * head.scale.shape[1] == n_in and size % _LEAST_GROUP == 0
    if not regular or (head.codes.dtype is torch.float8_e4m3fn and not float8):
        return False
    return head.codes.dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn) and (
        head.scale.shape[1] == 1 or bool(torch.equal(head.groups.cpu(), torch.arange(n_in) // size))
    )


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight as the kernel reads it."""

    codes: Tensor  # [n_out, n_in / 2] uint8 of 4 bits, or [n_out, n_in]
    scale: Tensor  # [n_out, n_groups]
    zero: Tensor | None  # [n_out, n_groups] uint8
    offset: Tensor | None  # [n_out, n_groups]
    n_in: int

    @property
    def halves(self) -> bool:
        """Whether a byte holds two codes."""
        return self.codes.shape[1] < self.n_in

    @classmethod
    def of(cls, weight: Stacked, device: torch.device) -> PackedWeight | None:
        """Pack weights that stay codes; None if they differ in their groups, codes, zeros or offsets."""
        bands = [band for part in weight.parts for band in _bands(part, _BAND)]
        kinds = {(b.codes.dtype, b.scale.shape[1], b.zero is None, b.offset is None) for b in bands}
        if len(kinds) > 1:
            return None
        small = bands[0].codes.dtype is torch.uint8 and all(int(band.codes.max()) < 16 for band in bands)
        bytes_ = torch.cat([_in_halves(band.codes) if small else band.codes.view(torch.uint8) for band in bands])
        codes = bytes_.to(device).view(bands[0].codes.dtype)
        scale = _exact(torch.cat([band.scale for band in bands])).to(device)
        zeros = [band.zero for band in bands if band.zero is not None]
        offsets = [band.offset for band in bands if band.offset is not None]
        zero = torch.cat(zeros).to(device) if zeros else None
        offset = _exact(torch.cat(offsets)).to(device) if offsets else None
        return cls(codes, scale, zero, offset, weight.shape[1])


class CodesLinear:
    """A product with codes, whose numbers are those of the dense weight; sums are float32."""

    def __init__(self, kernels: Any, packed: PackedWeight, bias: Tensor | None) -> None:
        self._kernels, self._packed, self._bias = kernels, packed, bias

    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + bias: [n, n_in] -> [n, n_out]."""
        return self._product(x, x.dtype)

    def in_float32(self, x: Tensor) -> Tensor:
        """Return the unrounded sums in float32."""
        return self._product(x, torch.float32)

    def _product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        packed, (n_out, n_groups) = self._packed, self._packed.scale.shape
        out = torch.empty((len(x), n_out), dtype=dtype, device=x.device)
        if not len(x):
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        few = len(x) <= _FEW_ROWS
        tile_rows, tile_outs = (_FEW_ROWS, 32) if few else (64, 64)
        self._kernels.product[(-(-n_out // tile_outs), -(-len(x) // tile_rows))](
            x,
            packed.codes,
            packed.scale,
            packed.scale if packed.zero is None else packed.zero,
            packed.scale if packed.offset is None else packed.offset,
            packed.scale if self._bias is None else self._bias,
            out,
            len(x),
            x.stride(0),
            n_out,
            n_in=packed.n_in,
            n_groups=n_groups,
            group=packed.n_in // n_groups,
            halves=packed.halves,
            has_zero=packed.zero is not None,
            has_offset=packed.offset is not None,
            has_bias=self._bias is not None,
            tile_rows=tile_rows,
            tile_outs=tile_outs,
            num_warps=2 if few else 4,
            num_stages=4,
        )
        return out


def _bands(weight: Weight, height: int) -> Iterator[Grouped]:
    """Yield the rows of a weight of codes, `height` at a time."""
    assert not isinstance(weight, Dense)
    for rows in read_rows(weight, height):
        band = weight.band(rows.start, rows.stop)
        if isinstance(band, PerChannel):
            groups = torch.zeros(band.shape[1], dtype=torch.int64)
            yield Grouped(band.codes, band.scale, None, groups)
        else:
            yield band


def _in_halves(codes: Tensor) -> Tensor:
    """Pack codes [n, n_in] of 4 bits: the first 32 of each 64 in the low halves of bytes, the others in the high."""
    low, high = codes.view(len(codes), -1, 2, _UNIT // 2).unbind(2)
    return (low | (high << 4)).flatten(1)


def _exact(numbers: Tensor) -> Tensor:
    """Return `numbers` in 16 bits if that changes none of them."""
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(numbers.to(dtype).float(), numbers.float()):
            return numbers.to(dtype)
    return numbers.float()
