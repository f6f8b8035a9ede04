"""FP8 of FBGEMM: e4m3 with a scale for each output."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.layout import SCALES, Grid, Layout


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    # The stored tensors show which modules are quantized; activations stay in the served dtype.
    config.pass_over("modules_to_not_convert", "activation_scale_ub")
    scales = Grid(("weight_scale",), SCALES, (1, 0))
    return Layout(Grid(("weight",), ("F8_E4M3",)), scales, unread=("input_scale_ub",))


FORMAT = Format("FP8 (e4m3), a scale for each output", "fbgemm_fp8", read)
