"""BitNet b1.58: -1, 0 or 1 times one scale; four planes of rows are packed into bytes of 2 bits each."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.layout import SCALES, Grid, Layout, Packing


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    config.require("quantization_mode", "offline")
    config.require("use_rms_norm", False)
    config.pass_over("modules_to_not_convert", "rms_norm_eps")  # the stored tensors show which modules are quantized
    config.require("linear_class", "bitlinear", "autobitlinear")
    divides = config.raw("linear_class") != "autobitlinear"
    return Layout(
        codes=Grid(("weight",), ("U8",), packing=Packing(2, dim=0, planes=True), offset=-1),
        scales=Grid(("weight_scale",), SCALES, (0, 0), inverse=divides),
    )


FORMAT = Format("ternary (BitNet b1.58)", "bitnet", read)
