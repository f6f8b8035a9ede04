"""The base with a LoRA adapter on its linear layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from services.common.fine_tuning.records import Order

# Models whose fused kernels read the weight of `out_proj` without calling the layer: PEFT refuses an adapter on it.
_FUSED = ("falcon_h1", "falcon_mamba", "mamba", "mamba2", "nemotron_h")
_LARGE = 10**9  # parameters, from which activations are computed again instead of kept


def load_model(base: Path, order: Order, device: torch.device, checkpoint: Path | None) -> PeftModel:
    """Load the base, frozen, with an adapter: a new one of the job's seed, or a checkpoint's."""
    torch.manual_seed(order.seed)
    # Most CPUs multiply bfloat16 several times slower than float32.
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options: dict[str, Any] = {"dtype": dtype}
    if order.quantization == "nf4":
        options["quantization_config"] = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    model = AutoModelForCausalLM.from_pretrained(base, local_files_only=True, **options)
    if order.quantization == "none":
        model = model.to(device)  # type: ignore[arg-type]  # a decorator hides the method's type
    large = sum(weight.numel() for weight in model.parameters()) >= _LARGE
    if order.quantization == "nf4":
        model = prepare_model_for_kbit_training(  # type: ignore[no-untyped-call]
            model, use_gradient_checkpointing=large
        )
    elif large:
        model.gradient_checkpointing_enable()  # type: ignore[no-untyped-call]
        model.enable_input_require_grads()  # type: ignore[no-untyped-call]
    config = LoraConfig(
        r=order.lora_rank, lora_alpha=2 * order.lora_rank, lora_dropout=0.0, target_modules="all-linear",
        exclude_modules=["out_proj"] if model.config.model_type in _FUSED else None, task_type="CAUSAL_LM", bias="none",
    )  # fmt: skip
    tuned = get_peft_model(model, config)
    if checkpoint is not None:
        set_peft_model_state_dict(tuned, load_file(checkpoint / "adapter_model.safetensors"))
    return tuned
