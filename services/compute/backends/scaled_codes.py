"""Keys and values as codes of 8 bits, with a scale for each token and head, written with the token."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.kv_format import AttentionKernels, RowWriter
from services.compute.backends.shapes import AttentionShape, KvShape

_SCALE = torch.bfloat16  # has the range of float32; codes are made with the rounded scale, so its precision is enough
_TINY = torch.finfo(torch.float32).tiny


@dataclass(frozen=True, slots=True)
class ScaledCodes:
    """Codes in plain torch, on any device. A number is its code times its scale.

    A layer is [n_blocks, 2 * n_kv_heads, run] int8: a run is what a block holds of a head of K or V, the codes
    [block_tokens, head_dim], then the scales [block_tokens]. Keys are rotated before they are coded. Codes and scales
    are a function of the token alone, so a block means the same on every worker.
    """

    name: str
    codes: torch.dtype
    largest: float  # code
    numbers: torch.dtype | None = None

    def token_bytes(self, shape: KvShape) -> int:
        """Return the bytes of a token in a layer."""
        return 2 * shape.n_kv_heads * (shape.head_dim + _SCALE.itemsize)

    def allocate(self, n_blocks: int, shape: KvShape, device: torch.device) -> Tensor:
        """Return a layer whose positions all read as zeros; a block has an even number of positions."""
        run = shape.block_tokens * (shape.head_dim + _SCALE.itemsize)
        return torch.zeros((n_blocks, 2 * shape.n_kv_heads, run), dtype=torch.int8, device=device)

    def write(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor, writer: RowWriter) -> None:
        """Write `rows` [n, width] to the positions `slots` [n]."""
        writer.scatter_codes(self, layer, shape, slots, rows)

    def write_rotated(
        self,
        layer: Tensor,
        shape: KvShape,
        slots: Tensor,
        heads: Tensor,
        n_rotated: int,
        rotation: Callable[[Tensor], None],
        writer: RowWriter,
    ) -> None:
        """Rotate the first `n_rotated` of `heads` [n_rows, n_heads, head_dim]; write the last ones to `slots` [n]."""
        writer.rotate_scatter_codes(self, layer, shape, slots, heads, n_rotated, rotation)

    def put(self, layer: Tensor, shape: KvShape, slots: Tensor, rows: Tensor) -> None:
        """Quantize `rows` [n, width] and write them to the positions `slots` [n].

        A scale is that of the head's largest number, rounded; 0 where it would be subnormal. Where a number is not
        finite neither is the scale, and the codes are 0, so that all of the head reads as NaN.
        """
        keys, values = rows.view(-1, 2, shape.n_kv_heads, shape.head_dim).float().unbind(1)
        heads = torch.cat((rotated(keys), values), dim=1)
        scales = (heads.abs().amax(-1) * (1 / self.largest)).to(_SCALE)
        scales = torch.where(scales.float() < _TINY, torch.zeros_like(scales), scales)
        exact = scales.float()
        usable = (exact > 0) & exact.isfinite()
        inverse = torch.where(usable, 1 / exact, torch.zeros_like(exact)).unsqueeze(-1)
        scaled = torch.where(inverse > 0, heads * inverse, torch.zeros_like(heads))
        if self.codes is torch.int8:
            scaled = scaled.round()
        codes = scaled.clamp(-self.largest, self.largest).to(self.codes).view(torch.int8)
        blocks, places = slots // shape.block_tokens, slots % shape.block_tokens
        stored, stored_scales = self._parts(layer, shape)
        stored[blocks, :, places] = codes
        stored_scales[blocks, :, places] = scales

    def read(self, layer: Tensor, shape: KvShape, slots: Tensor, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        """Return the positions `slots` [n] as [n, width] of `dtype`."""
        blocks, places = slots // shape.block_tokens, slots % shape.block_tokens
        codes, scales = (part[blocks, :, places] for part in self._parts(layer, shape))
        keys, values = (codes.view(self.codes).float() * scales.float().unsqueeze(-1)).chunk(2, dim=1)
        found = torch.stack((rotated(keys), values), dim=1).to(dtype).view(-1, shape.width)
        return found if out is None else out.copy_(found)

    def attentions(self, shape: AttentionShape, kernels: AttentionKernels) -> Sequence[Callable[[], Any]]:
        """Return the device's attentions over these codes."""
        return kernels.over_codes(shape, self)

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
