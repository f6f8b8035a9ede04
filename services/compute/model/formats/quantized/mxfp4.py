"""MXFP4 of gpt-oss: floats of 4 bits, and for each 32 of a row an exponent of 2, of all experts of a layer together."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.layout import Grid, Layout, Packing


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    config.require("dequantize", True, False)
    config.pass_over("modules_to_not_convert")  # the stored tensors show which modules are quantized
    codes = Grid(("blocks",), ("U8",), packing=Packing(4, dim=1))
    return Layout(codes, Grid(("scales",), ("U8",), block=(1, 32)), microscaled=True)


FORMAT = Format("MXFP4 (gpt-oss)", "mxfp4", read)
