"""Packed integers of compressed-tensors: 2, 4 or 8 bits in words of 32, along the inputs."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.formats.compressed_tensors import UNREAD, read_weights
from services.compute.model.layout import Grid, Layout, Packing

_ZEROS, _GROUPS = "weight_zero_point", "weight_g_idx"


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    weights = read_weights(config, "int")
    if weights.bits not in (2, 4, 8):
        raise config.error("config_groups", f"num_bits: {weights.bits} is not implemented; allowed: 2, 4, 8")
    middle = -(1 << (weights.bits - 1))  # signed numbers are stored from 0 on
    zeros = Grid((_ZEROS,), ("I32",), weights.block, packing=Packing(weights.bits, dim=0), offset=middle)
    return Layout(
        codes=Grid(("weight_packed",), ("I32",), packing=Packing(weights.bits, dim=1), offset=middle),
        scales=weights.scales,
        zeros=None if weights.symmetric else zeros,
        groups=_GROUPS if weights.reordered else "",
        unread=UNREAD,
    )


FORMAT = Format("packed integers (INT4 and others)", "compressed-tensors", read, ("pack-quantized",))
