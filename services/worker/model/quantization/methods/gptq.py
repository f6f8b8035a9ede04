"""GPTQ: 2, 4 or 8 bits packed along the inputs, tensors stored [in, out], inputs perhaps sorted before grouping."""

from __future__ import annotations

from services.worker.model.families.config import Config
from services.worker.model.quantization.layout import SCALES, Grid, Layout, Packing
from services.worker.model.quantization.method import Method

_GROUPS = "g_idx"
# How it was made, by which program, and what else that knows. Which modules are quantized is seen by their tensors.
_MADE_BY = """
    damp_percent damp_auto_increment true_sequential static_groups sym dataset tokenizer batch_size model_seqlen
    max_input_length pad_token_id cache_block_outputs model_name_or_path model_file_base_name meta quantizer mse
    use_cuda_fp16 use_exllama exllama_config disable_exllama backend hyb_act act_group_aware lm_head
    block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize
    """


def read(config: Config) -> Layout:
    """Read the configuration. Raises ModelError."""
    config.pass_over(*_MADE_BY.split())
    config.require("bits", 2, 4, 8)
    config.require("pack_dtype", "int32")
    config.require("is_marlin_format", False)
    config.require("method", "gptq")
    config.require("format", "gptq", "gptq_v2")
    version = config.first_of("checkpoint_format", "format")
    config.require(version, "gptq", "gptq_v2")
    _refuse_other_settings(config)
    bits, block = config.integer("bits"), _block(config)
    offset = 0 if config.raw(version) == "gptq_v2" else 1  # the first version stores zeros less 1
    return Layout(
        codes=Grid(("qweight",), ("I32",), transposed=True, packing=Packing(bits, dim=1)),
        scales=Grid(("scales",), SCALES, block, transposed=True),
        zeros=Grid(("qzeros",), ("I32",), block, transposed=True, packing=Packing(bits, dim=0), offset=offset),
        groups=_GROUPS,
        optional=() if config.flag("desc_act", False) else (_GROUPS,),
    )


def _block(config: Config) -> tuple[int, int]:
    if config.raw("group_size") == -1:  # all inputs
        return 1, 0
    return 1, config.integer("group_size")


def _refuse_other_settings(config: Config) -> None:
    """Modules may be left out by pattern ("-:"), not quantized in another way."""
    dynamic = config.raw("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise config.error("dynamic", f"expected an object, found {dynamic!r}")
    others = [pattern for pattern in dynamic if not str(pattern).startswith("-:")]
    if others:
        raise config.error("dynamic", f"settings of its own for {others[0]!r} are not implemented; allowed: '-:…'")


METHOD = Method("GPTQ", "gptq", read)
