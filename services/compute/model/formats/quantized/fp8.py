"""FP8 of DeepSeek, Qwen and AutoFP8: e4m3 with a float32 scale for each block, or for a whole weight."""

from __future__ import annotations

from services.compute.model.families.config import Config
from services.compute.model.formats.base import Format
from services.compute.model.layout import SCALES, Grid, Layout


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    config.require("fmt", "e4m3", "float8_e4m3fn")
    config.require("scale_fmt", "float")
    config.require("expert_dtype", "fp8")
    config.require("is_checkpoint_fp8_serialized", True)
    config.require("dequantize", True, False)
    # The stored tensors show which modules are quantized; activations and the KV cache stay in the served dtype.
    config.pass_over("modules_to_not_convert", "modules_to_convert", "ignored_layers")
    config.pass_over("activation_scheme", "kv_cache_scheme")
    block = config.raw("weight_block_size") or [0, 0]
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size >= 0 for size in block)):
        raise config.error("weight_block_size", f"expected two sizes, found {block!r}")
    scales = Grid(("weight_scale_inv", "weight_scale"), SCALES, (block[0], block[1]))  # a factor, despite the name
    return Layout(Grid(("weight",), ("F8_E4M3",)), scales, unread=("input_scale", "activation_scale"))


FORMAT = Format("FP8 (e4m3) in blocks or per tensor", "fp8", read)
