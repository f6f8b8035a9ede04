"""GPTQ: 2, 4 or 8 bits packed along the inputs, tensors stored [in, out], inputs perhaps sorted before grouping."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.formats.producers import pass_over_producers
from services.compute.model.layout import SCALES, Grid, Layout, Packing

_GROUPS = "g_idx"


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    pass_over_producers(config)
    config.require("bits", 2, 4, 8)
    config.require("is_marlin_format", False)
    config.require("method", "gptq")
    config.require("format", "gptq", "gptq_v2")
    version = config.first_of("checkpoint_format", "format")
    config.require(version, "gptq", "gptq_v2")
    bits, block = config.integer("bits"), _block(config)
    less = 0 if config.raw(version) == "gptq_v2" else 1  # the first version stores zeros minus 1
    return Layout(
        codes=Grid(("qweight",), ("I32",), transposed=True, packing=Packing(bits, dim=1)),
        scales=Grid(("scales",), SCALES, block, transposed=True),
        zeros=Grid(("qzeros",), ("I32",), block, transposed=True, packing=Packing(bits, dim=0, less=less)),
        groups=_GROUPS,
        optional=() if config.flag("desc_act", False) else (_GROUPS,),
        symmetric=config.raw("sym") is True,  # then the tensor shows the version, which some programs name wrongly
    )


def _block(config: Config) -> tuple[int, int]:
    if config.raw("group_size") == -1:  # all inputs
        return 1, 0
    return 1, config.integer("group_size")


FORMAT = Format("GPTQ", "gptq", read)
