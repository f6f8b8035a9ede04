"""Keys that the programs which write GPTQ and AWQ checkpoints add about their method."""

from __future__ import annotations

from services.compute.model.families.config import Config

# AutoGPTQ, GPTQModel, AutoAWQ, optimum and auto-round. The stored tensors show which modules are quantized, their
# shapes show settings of single modules, and activations stay in the served dtype.
_MADE_BY = """
    damp_percent damp_auto_increment true_sequential static_groups sym dataset tokenizer batch_size model_seqlen
    max_input_length pad_token_id cache_block_outputs model_name_or_path model_file_base_name meta quantizer mse
    use_cuda_fp16 use_exllama exllama_config disable_exllama backend hyb_act act_group_aware lm_head
    block_name_to_quantize module_name_preceding_first_block modules_in_block_to_quantize gptaq failsafe fail_safe
    modules_to_not_convert ignore do_fuse fuse_max_seq_len modules_to_fuse
    autoround_version provider packing_format enable_minmax_tuning enable_norm_bias_tuning enable_quanted_input
    gradient_accumulate_steps iters lr minmax_lr lr_scheduler momentum low_gpu_mem_usage low_cpu_mem_usage nsamples
    seqlen train_bs nblocks sampler seed scale_dtype amp not_use_best_mse dynamic_max_gap enable_torch_compile
    enable_full_range enable_alg_ext quant_block_list to_quant_block_names regex_config layer_config extra_config
    supported_types quant_lm_head model_free use_best_mse act_bits act_group_size act_sym act_dynamic act_data_type
    """


def pass_over_producers(config: Config) -> None:
    """Accept keys that do not change the weights; `finish` refuses others. Raises ModelError."""
    config.pass_over(*_MADE_BY.split())
    config.require("pack_dtype", "int32")
    config.require("data_type", "int")
    for rotation in ("rotation", "rotation_config", "hadamard_config"):
        config.require(rotation, {}, "")
    _refuse_other_settings(config)


def _refuse_other_settings(config: Config) -> None:
    """Refuse patterns that quantize modules differently; patterns that exclude modules ("-:") are accepted."""
    dynamic = config.raw("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise config.error("dynamic", f"expected an object, found {dynamic!r}")
    others = [pattern for pattern in dynamic if not str(pattern).startswith("-:")]
    if others:
        raise config.error("dynamic", f"settings of its own for {others[0]!r} are not implemented; allowed: '-:…'")
