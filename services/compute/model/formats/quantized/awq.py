"""AWQ: 4 bits packed along the outputs in AWQ's order, tensors stored [in, out]."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.formats.producers import pass_over_producers
from services.compute.model.layout import SCALES, Grid, Layout, Packing

_PACKING = Packing(bits=4, dim=0, places=(0, 4, 1, 5, 2, 6, 3, 7))


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    pass_over_producers(config)
    config.pass_over("zero_point", "desc_act")  # zeros are always stored, and inputs are never sorted
    config.require("bits", 4)
    config.require("method", "awq")
    for version in ("version", "format", "checkpoint_format"):
        config.require(version, "gemm", "GEMM")
    block = (1, 0) if config.raw("group_size") == -1 else (1, config.integer("group_size", 128))
    return Layout(
        codes=Grid(("qweight",), ("I32",), transposed=True, packing=_PACKING),
        scales=Grid(("scales",), SCALES, block, transposed=True),
        zeros=Grid(("qzeros",), ("I32",), block, transposed=True, packing=_PACKING),
    )


FORMAT = Format("AWQ (INT4)", "awq", read)
