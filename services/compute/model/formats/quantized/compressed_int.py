"""INT8 of compressed-tensors: one byte for each element, scales per tensor, output, group of inputs or block."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.formats.compressed_tensors import UNREAD, read_weights
from services.compute.model.layout import Grid, Layout

_ZEROS, _GROUPS = "weight_zero_point", "weight_g_idx"


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    weights = read_weights(config, "int")
    if weights.bits != 8:
        raise config.error("config_groups", f"num_bits: {weights.bits} of int-quantized is not implemented; allowed: 8")
    optional = (_ZEROS,) if weights.symmetric else ()  # some programs store zeros of 0
    return Layout(
        codes=Grid(("weight",), ("I8",)),
        scales=weights.scales,
        zeros=Grid((_ZEROS,), ("I8",), weights.block),
        groups=_GROUPS if weights.reordered else "",
        optional=optional,
        unread=UNREAD,
    )


FORMAT = Format("INT8", "compressed-tensors", read, ("int-quantized",))
