"""FP8 of compressed-tensors: e4m3 with scales per tensor, output, group of inputs or block."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.formats.compressed_tensors import UNREAD, read_weights
from services.compute.model.layout import Grid, Layout


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    weights = read_weights(config, "float")
    if weights.bits != 8:
        raise config.error("config_groups", f"num_bits: {weights.bits} of float is not implemented; allowed: 8")
    return Layout(Grid(("weight",), ("F8_E4M3",)), weights.scales, unread=UNREAD)


FORMAT = Format("FP8 (e4m3)", "compressed-tensors", read, ("float-quantized",))
