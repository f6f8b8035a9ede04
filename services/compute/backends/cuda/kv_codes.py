"""Writes to a cache of 8-bit codes on a GPU."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from services.compute.backends.cuda.small import TritonRotation, power_of_two
from services.compute.backends.kv_format import Coding
from services.compute.backends.shapes import KvShape


class CodeWriter:
    """Rotates, codes and writes a step's keys and values by one launch."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def store(
        self,
        coding: Coding,
        layer: Tensor,
        shape: KvShape,
        slots: Tensor,
        qkv: Tensor,
        rotation: TritonRotation | None,
    ) -> None:
        """Write K and V of `qkv` [n_rows, heads of Q, K, V] to `slots` [n]; rotate queries and keys in place before."""
        heads = qkv[: len(slots), -shape.width :] if rotation is None else qkv
        n, n_heads, head_dim = len(heads), heads.shape[1] // shape.head_dim, shape.head_dim
        if not n:
            return
        cos, sin, positions = (heads, heads, slots) if rotation is None else rotation.angles
        half = head_dim // 2 if rotation is None else cos.shape[1]
        part = head_dim & -head_dim  # the largest power of two that divides it
        self._kernels.write[(n, n_heads)](
            heads,
            cos,
            sin,
            positions,
            layer,
            layer.view(torch.int16),
            slots,
            heads.stride(0),
            len(slots),
            1 / math.sqrt(part),
            1 / coding.largest,
            largest=coding.largest,
            codes_dtype=str(coding.codes).removeprefix("torch."),
            n_queries=n_heads - 2 * shape.n_kv_heads,
            n_rotated=0 if rotation is None else n_heads - shape.n_kv_heads,
            n_heads=n_heads,
            head_dim=head_dim,
            half=half,
            n_pairs=power_of_two(half),
            n_dims=power_of_two(head_dim),
            n_levels=part.bit_length() - 1,
            block_tokens=shape.block_tokens,
            num_warps=1,
            enable_fp_fusion=False,
        )
