"""Layouts of keys and values in the cache; `FORMAT` of a file of `kv_formats/` opens one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from services.compute.backends.shapes import AttentionShape, KvShape
from services.compute.backends.zeros import zeros

_SCALE = torch.bfloat16  # has the range of float32; codes are made with the rounded scale, so its precision is enough
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class Coding:
    """Codes of 8 bits with a scale for each token and head, as a device's kernels see them."""

    codes: torch.dtype
    largest: float  # code


class AttentionKernels(Protocol):
    """A device's attentions that read the cache as it is stored: constructors, best first; none if none applies."""

    def over_numbers(self, shape: AttentionShape, numbers: torch.dtype) -> Sequence[Callable[[], Any]]:
        """Return attentions over layers of plain `numbers`."""

    def over_codes(self, shape: AttentionShape, coding: Coding) -> Sequence[Callable[[], Any]]:
        """Return attentions over layers of these codes."""


class KvFormat(Protocol):
    """Allocates, writes and reads a layer of the cache.

    A layer is one contiguous tensor whose first dimension is the block, so one copier of blocks serves all formats.
    Devices whose kernels know `numbers` or `coding` store by these; `write` is the definition for all others.
    """

    name: str
    numbers: torch.dtype | None  # dtype of layers [n_blocks, block_tokens, 2, n_kv_heads, head_dim] for kernels
    coding: Coding | None  # codes of layers [n_blocks, 2 * n_kv_heads, run] for kernels

    def allocate(self, n_blocks: int, shape: KvShape, device: torch.device) -> Tensor:
        """Return a layer whose positions all read as zeros."""

    def write(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, width] to the positions `slots` [n], in plain torch."""

    def read(self, layer: Tensor, shape: KvShape, slots: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the positions `slots` [n] as [n, width] of `dtype`; in `out` if given."""

    def attentions(self, shape: AttentionShape, kernels: AttentionKernels) -> Sequence[Callable[[], Any]]:
        """Return a device's attentions over this format, best first; the caller adds one that uses `read`."""


@dataclass(frozen=True, slots=True)
class PlainNumbers:
    """Numbers of one dtype; rows of another dtype are rounded to it."""

    name: str
    numbers: torch.dtype
    coding: Coding | None = None

    def allocate(self, n_blocks: int, shape: KvShape, device: torch.device) -> Tensor:
        """Return a layer of zeros, [n_blocks, block_tokens, 2, n_kv_heads, head_dim].

        K and V of a token are adjacent, so that one copy writes and one gather reads both.
        """
        sizes = (n_blocks, shape.block_tokens, 2, shape.n_kv_heads, shape.head_dim)
        return zeros(sizes, self.numbers, device)

    def write(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor) -> None:
        """Write `rows` [n, width] to the positions `slots` [n]."""
        layer.view(-1, shape.width).index_copy_(0, slots, rows.to(self.numbers))

    def read(self, layer: Tensor, shape: KvShape, slots: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the positions `slots` [n] as [n, width] of `dtype`."""
        rows = layer.view(-1, shape.width)
        if dtype is self.numbers:
            return torch.index_select(rows, 0, slots, out=out)
        read = rows.index_select(0, slots).to(dtype)
        return read if out is None else out.copy_(read)

    def attentions(self, shape: AttentionShape, kernels: AttentionKernels) -> Sequence[Callable[[], Any]]:
        """Return the device's attentions over plain numbers."""
        return kernels.over_numbers(shape, self.numbers)


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    """Codes of 8 bits in plain torch, with a scale for each token and head; a number is its code times its scale.

    A layer is [n_blocks, 2 * n_kv_heads, run] int8: a run is what a block holds of a head of K or V, the codes
    [block_tokens, head_dim], then the scales [block_tokens]. Keys are rotated before they are coded. Codes and scales
    are a function of the token alone, so a block means the same on every worker.
    """

    name: str
    coding: Coding
    numbers: torch.dtype | None = None

    def allocate(self, n_blocks: int, shape: KvShape, device: torch.device) -> Tensor:
        """Return a layer whose positions all read as zeros; a block has an even number of positions."""
        run = shape.block_tokens * (shape.head_dim + _SCALE.itemsize)
        return zeros((n_blocks, 2 * shape.n_kv_heads, run), torch.int8, device)

    def write(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor) -> None:
        """Quantize `rows` [n, width] and write them to the positions `slots` [n].

        A scale is that of the head's largest number, rounded; 0 where it would be subnormal. Where a number is not
        finite neither is the scale, and the codes are 0, so that all of the head reads as NaN.
        """
        dtype, largest = self.coding.codes, self.coding.largest
        keys, values = rows.view(-1, 2, shape.n_kv_heads, shape.head_dim).float().unbind(1)
        heads = torch.cat((rotated(keys), values), dim=1)
        scales = (heads.abs().amax(-1) * (1 / largest)).to(_SCALE)
        scales = torch.where(scales.float() < _TINY, torch.zeros_like(scales), scales)
        exact = scales.float()
        usable = (exact > 0) & exact.isfinite()
        inverse = torch.where(usable, 1 / exact, torch.zeros_like(exact)).unsqueeze(-1)
        scaled = torch.where(inverse > 0, heads * inverse, torch.zeros_like(heads))
        if dtype is torch.int8:
            scaled = scaled.round()
        codes = scaled.clamp(-largest, largest).to(dtype).view(torch.int8)
        blocks, places = slots // shape.block_tokens, slots % shape.block_tokens
        stored, stored_scales = self._parts(layer, shape)
        stored[blocks, :, places] = codes
        stored_scales[blocks, :, places] = scales

    def read(self, layer: Tensor, shape: KvShape, slots: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the positions `slots` [n] as [n, width] of `dtype`."""
        blocks, places = slots // shape.block_tokens, slots % shape.block_tokens
        codes, scales = (part[blocks, :, places] for part in self._parts(layer, shape))
        keys, values = (codes.view(self.coding.codes).float() * scales.float().unsqueeze(-1)).chunk(2, dim=1)
        rows = torch.stack((rotated(keys), values), dim=1).to(dtype).view(-1, shape.width)
        return rows if out is None else out.copy_(rows)

    def attentions(self, shape: AttentionShape, kernels: AttentionKernels) -> Sequence[Callable[[], Any]]:
        """Return the device's attentions over these codes."""
        return kernels.over_codes(shape, self.coding)

    def _parts(self, layer: Tensor, shape: KvShape) -> tuple[Tensor, Tensor]:
        """Return views of codes [n_blocks, 2 * n_kv_heads, block_tokens, head_dim] and scales [..., block_tokens]."""
        size = shape.block_tokens * shape.head_dim
        codes = layer[..., :size].view(len(layer), -1, shape.block_tokens, shape.head_dim)
        return codes, layer[..., size:].view(_SCALE)


def rotated(heads: Tensor) -> Tensor:
    """Return `heads` [..., head_dim] times an orthonormal Walsh-Hadamard matrix, which is its own inverse.

    Some channels of keys are much larger than the others, and would make all codes of their head coarse. This spreads
    them over the head (Ashkboos et al., QuaRot, arXiv:2404.00456). Heads that are no power of two are rotated in parts.
    """
    shape, size = heads.shape, heads.shape[-1]
    part, x, h = size & -size, heads, 1
    x = x * (1 / math.sqrt(part))
    while h < part:
        a, b = x.reshape(*shape[:-1], size // (2 * h), 2, h).unbind(-2)
        x, h = torch.stack((a + b, a - b), dim=-2), 2 * h
    return x.reshape(shape)


def find_kv_format(name: str) -> KvFormat:
    """Return the format of that name, a file of `kv_formats/`."""
    kv_format: KvFormat = import_module(f"services.compute.backends.kv_formats.{name}").FORMAT.open()
    return kv_format


def plain_format(dtype: torch.dtype) -> KvFormat:
    """Return the format of plain numbers of `dtype`."""
    return find_kv_format(str(dtype).removeprefix("torch."))
