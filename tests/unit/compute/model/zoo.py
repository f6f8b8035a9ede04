"""Tiny random checkpoints of every family, written by transformers, with its logits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models import BUNDLED_MODEL
from tests.unit.compute.model import renamed, stateful
from tests.unit.compute.model.renamed import Json, Tensors

N_TOKENS = 44
N_PIECES = 4096  # tokens of the bundled model
_SHAPE: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}


def rope(**settings: Any) -> dict[str, Any]:
    """The setting of the rope of a configuration."""
    return {"rope_parameters": {"rope_theta": 10_000.0, **settings}}


_YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_GPT2: dict[str, Any] = {"vocab_size": 99, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 128}
_NO_KV_HEADS = {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
_NO_FFN = {key: value for key, value in _NO_KV_HEADS.items() if key != "intermediate_size"}
_STATE_SPACE = {key: _SHAPE[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")} | {
    "eos_token_id": 1,
    "bos_token_id": 2,
}
# The sizes of configurations that spell them in another way.
_SHAPES: dict[str, dict[str, Any]] = {
    "GPT2Config": _GPT2,
    "GPTBigCodeConfig": _GPT2,
    "GPTJConfig": _GPT2,
    "MambaConfig": _STATE_SPACE,
    "FalconMambaConfig": _STATE_SPACE,
    "Mamba2Config": _STATE_SPACE
    | {"num_heads": 8, "head_dim": 12, "state_size": 16, "n_groups": 4, "chunk_size": 16, "expand": 2},
    "NemotronHConfig": {key: value for key, value in _SHAPE.items() if key != "num_hidden_layers"},
    "GPTNeoXConfig": _NO_KV_HEADS,
    "OPTConfig": {**_NO_FFN, "ffn_dim": 64},
    "BloomConfig": {"vocab_size": 99, "hidden_size": 48, "n_layer": 2, "seq_length": 128},
    "MptConfig": {"vocab_size": 99, "d_model": 48, "n_layers": 2, "max_seq_len": 128},
    "FalconConfig": {**_NO_FFN, "ffn_hidden_size": 64},
}


def make(config: str, **settings: Any) -> Callable[[], transformers.PretrainedConfig]:
    """Return what makes a configuration of that class of transformers: a tiny one, but for `settings`."""
    shape = _SHAPES.get(config, _SHAPE)
    return lambda: getattr(transformers, config)(**{**shape, **settings})


# Towers of vision as small as they can be; those of models that see have fourteen patches on a side, whose edges are
# not exact in float32.
_SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 2,
}
_QWEN = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 48}
_VISION: dict[str, dict[str, Any]] = {
    "Llama4": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    "Mistral3": {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
    **dict.fromkeys(("SmolVLM", "Idefics3", "Gemma3"), _SIGLIP),
    **dict.fromkeys(("Qwen2_5_VL", "Qwen3_5", "Qwen3_5Moe", "Qwen3VL", "Qwen3VLMoe"), _QWEN),
}
_MROPE = rope(rope_type="default", mrope_section=[2, 2, 2])


def _multimodal(name: str, **text: Any) -> Callable[[], transformers.PretrainedConfig]:
    vision = _VISION[name] | ({"head_dim": 8} if name == "Mistral3" else {})
    settings = {"text_config": {**_SHAPE, **text}, "vision_config": vision, "tie_word_embeddings": False}
    if vision.get("image_size") == _SIGLIP["image_size"]:
        settings |= {"image_token_id": 98, "mm_tokens_per_image": 49}
    return lambda: getattr(transformers, f"{name}Config")(**settings)


_LAYERS3: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_SLIDES: dict[str, Any] = {"sliding_window": 13}
_CAPS: dict[str, Any] = {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0}
_LONG = {"short_factor": [1.0, 1.1, 1.3, 1.7, 2.1, 2.5], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0]}
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.5,
}
_GROUPED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 3,
}
_HALF = rope(rope_type="default", partial_rotary_factor=0.5)
_MOE: dict[str, Any] = {"num_experts_per_tok": 2, "num_local_experts": 4}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_LLAMA4: dict[str, Any] = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 40,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    "attention_chunk_size": 16,
    "floor_scale": 8,
}

VARIANTS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "llama": make("LlamaConfig"),
    "llama_tied_biased": make("LlamaConfig", tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama_mha_wide": make("LlamaConfig", num_key_value_heads=4, head_dim=24, hidden_act="gelu"),
    "llama_linear": make("LlamaConfig", **rope(rope_type="linear", factor=3.0)),
    "llama_dynamic": make("LlamaConfig", **rope(rope_type="dynamic", factor=3.0)),
    "llama_llama3": make(
        "LlamaConfig",
        **rope(**_YARN | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ),
    "llama_yarn": make("LlamaConfig", head_dim=32, **rope(**_YARN, beta_fast=8.0)),
    "llama_yarn_mscale": make(
        "LlamaConfig", **rope(**_YARN, mscale=0.7, mscale_all_dim=1.3, beta_fast=4.0, beta_slow=0.5)
    ),
    "mistral": make("MistralConfig", head_dim=16, **_SLIDES),
    "mixtral": make("MixtralConfig", **_MOE, sliding_window=None),
    "qwen2": make("Qwen2Config", tie_word_embeddings=True),
    "qwen2_sliding": make("Qwen2Config", use_sliding_window=True, **_SLIDES, **_LAYERS3, max_window_layers=1),
    "qwen3": make("Qwen3Config", head_dim=16),
    "qwen3_moe": make(
        "Qwen3MoeConfig",
        **{**_MOE, "num_hidden_layers": 3},
        head_dim=16,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "qwen3_moe_unnormalised": make(
        "Qwen3MoeConfig", **_MOE, head_dim=16, moe_intermediate_size=32, norm_topk_prob=False
    ),
    "gemma": make("GemmaConfig", head_dim=16, num_key_value_heads=1),
    "gemma2": make(
        "Gemma2Config",
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
        **_SLIDES,
        **_LAYERS3,
    ),
    "gemma3": make(
        "Gemma3TextConfig",
        head_dim=16,
        query_pre_attn_scalar=24,
        **_CAPS,
        **_SLIDES,
        **_LAYERS3,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
        },
    ),
    "phi3": make("Phi3Config", **_SLIDES),
    "phi3_longrope": make(
        "Phi3Config",
        original_max_position_embeddings=32,
        **rope(rope_type="longrope", partial_rotary_factor=1.0, **_LONG),
    ),
    "phi3_longrope_short": make(
        "Phi3Config",
        original_max_position_embeddings=128,
        **rope(rope_type="longrope", partial_rotary_factor=1.0, **_LONG),
    ),
    "phi3_partial": make("Phi3Config", **_HALF),
    "gpt2": make("GPT2Config"),
    "gpt2_unscaled_wide": make("GPT2Config", n_inner=96, scale_attn_weights=False, activation_function="relu"),
    "gpt_neox": make("GPTNeoXConfig", **_HALF),
    "gpt_neox_serial": make(
        "GPTNeoXConfig",
        **_HALF,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_new",
        tie_word_embeddings=True,
    ),
    "olmo2": make("Olmo2Config"),
    "granite": make("GraniteConfig", **_MULTIPLIERS, tie_word_embeddings=True),
    "smollm3": make(
        "SmolLM3Config", **{**_SLIDES, "num_hidden_layers": 3}, no_rope_layer_interval=2, use_sliding_window=True
    ),
    "starcoder2": make("Starcoder2Config", **_SLIDES),
    "starcoder2_unbiased": make("Starcoder2Config", use_bias=False, tie_word_embeddings=False),
    "stablelm": make("StableLmConfig", use_qkv_bias=True, **_HALF),
    "stablelm_parallel": make("StableLmConfig", use_parallel_residual=True, **_HALF),
    "olmoe": make("OlmoeConfig", num_experts_per_tok=2, num_experts=4),
    "seed_oss": make("SeedOssConfig", attention_bias=True, attention_out_bias=True, mlp_bias=True, head_dim=16),
    "opt": make("OPTConfig"),
    "exaone4": make("Exaone4Config", **_SLIDES, **_LAYERS3),
    "exaone4_global": make("Exaone4Config", sliding_window=None, layer_types=["full_attention"] * 2),
    "arcee": make("ArceeConfig", mlp_bias=True),
    "nemotron": make("NemotronConfig"),
    "jais2": make("Jais2Config"),
    "phi": make("PhiConfig"),
    "gptj": make("GPTJConfig", rotary_dim=8),
    "gpt_bigcode": make("GPTBigCodeConfig", n_inner=64),
    "gpt_bigcode_heads": make("GPTBigCodeConfig", multi_query=False),
    "bloom": make("BloomConfig", n_head=12),
    "mpt": make("MptConfig", n_heads=12, attn_config={"softmax_scale": 0.4}),
    "falcon": make("FalconConfig"),
    "falcon_grouped": make("FalconConfig", new_decoder_architecture=True, num_kv_heads=2, bias=True),
    "falcon_grouped_one_norm": make(
        "FalconConfig", new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1
    ),
    "falcon_serial": make("FalconConfig", multi_query=False, parallel_attn=False),
    "granitemoe": make("GraniteMoeConfig", **_MOE, **_MULTIPLIERS),
    "qwen2_moe": make("Qwen2MoeConfig", num_hidden_layers=3, mlp_only_layers=[1], **stateful.SHARED_EXPERT),
    "cohere": make("CohereConfig", attention_bias=True),
    "cohere2": make("Cohere2Config", **_SLIDES, **_LAYERS3),
    "glm": make("GlmConfig", head_dim=16),
    "glm4": make("Glm4Config", head_dim=16),
    "helium": make("HeliumConfig", head_dim=12, attention_bias=True),
    "ernie4_5": make("Ernie4_5Config", head_dim=16, use_bias=True),
    "olmo3": make(
        "Olmo3Config",
        **_SLIDES,
        **_LAYERS3,
        rope_parameters={
            "full_attention": {**_YARN, "rope_theta": 10_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "glm4_moe": make("Glm4MoeConfig", head_dim=16, use_qk_norm=True, **_GROUPED),
    "dots1": make("Dots1Config", **_SLIDES, **_GROUPED, max_window_layers=1),
    "ministral3": make(
        "Ministral3Config",
        head_dim=16,
        **rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, llama_4_scaling_beta=0.5),
    ),
    "gemma3_multimodal": _multimodal("Gemma3", head_dim=16, query_pre_attn_scalar=24, **_CAPS, **_SLIDES, **_LAYERS3),
    "mistral3_multimodal": _multimodal("Mistral3", model_type="mistral", head_dim=16),
    "qwen2_5_vl_multimodal": _multimodal("Qwen2_5_VL", **_MROPE),
    "qwen3_vl_multimodal": _multimodal("Qwen3VL", head_dim=12, **_MROPE),
    "qwen3_vl_moe_multimodal": _multimodal("Qwen3VLMoe", head_dim=12, **stateful.EXPERTS, **_MROPE),
    "smolvlm": _multimodal("SmolVLM", model_type="llama"),
    "idefics3": _multimodal("Idefics3", model_type="llama"),
    "llama4_multimodal": _multimodal("Llama4", **_LLAMA4),
    "bitnet": make("BitNetConfig"),
    "apertus": make("ApertusConfig", **rope(rope_type="default")),
    "phimoe": make("PhimoeConfig", **_MOE, attention_bias=True, lm_head_bias=True, router_jitter_noise=0.3),
    # The factors of both lengths are equal, because transformers takes the short ones at every length.
    "phimoe_longrope": make(
        "PhimoeConfig",
        **_MOE,
        original_max_position_embeddings=32,
        **rope(
            rope_type="longrope",
            short_mscale=1.2,
            long_mscale=1.3,
            original_max_position_embeddings=32,
            **{**_LONG, "short_factor": _LONG["long_factor"]},
        ),
    ),
    "deepseek_v2": make(
        "DeepseekV2Config", **_LATENT, **{**_GROUPED, "norm_topk_prob": False}, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": make(
        "DeepseekV3Config",
        **{**_LATENT, "q_lora_rank": 20},
        **_GROUPED,
        num_nextn_predict_layers=0,
        **rope(**_YARN, beta_fast=4.0, mscale=0.7, mscale_all_dim=1.3),
    ),
    "gpt_oss": make(
        "GptOssConfig",
        **{**_MOE, **_SLIDES, **_LAYERS3},
        head_dim=16,
        **rope(**_YARN, beta_fast=8.0, truncate=False),
    ),
    "llama4": make("Llama4TextConfig", **_LLAMA4),
    "internlm2": make("LlamaConfig"),
    "internlm3": make("LlamaConfig", head_dim=16, attention_bias=True, mlp_bias=True),
    "minicpm": make("GraniteConfig", **{**_MULTIPLIERS, "attention_multiplier": 12**-0.5}, tie_word_embeddings=True),
    **stateful.variants(make, _multimodal, _MOE, _MULTIPLIERS, _MROPE),
    "hunyuan_v1_dense": make("HunYuanDenseV1Config", head_dim=16, **rope(rope_type="dynamic", factor=1.0, alpha=50.0)),
}


# Published code outside of transformers, which equals one of its models but for names: they are changed afterwards.
RENAMED: dict[str, Callable[[Json, Tensors], tuple[Json, Tensors]]] = {
    "internlm2": renamed.internlm2,
    "internlm3": renamed.internlm3,
    "kimi_linear_published": renamed.kimi_linear,
    "minicpm": renamed.minicpm,
}


def write_variant(variant: str, folder: Path) -> transformers.PreTrainedModel:
    """Write the checkpoint of a variant as it is published; returns the model of transformers that equals it."""
    model = write_checkpoint(VARIANTS[variant](), folder)
    if variant in RENAMED:
        config, tensors = folder / "config.json", folder / "model.safetensors"
        values, stored = RENAMED[variant](json.loads(config.read_text()), load_file(tensors))
        config.write_text(json.dumps(values))
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, tensors)
    return model


def write_checkpoint(
    config: transformers.PretrainedConfig, folder: Path, seed: int = 0
) -> transformers.PreTrainedModel:
    """Write a checkpoint whose every tensor is random, biases and norms too, so that none can go unnoticed."""
    torch.manual_seed(0)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    auto = transformers.AutoModelForImageTextToText if config.model_type in names else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation="eager").eval()
    randomise(model)
    model.save_pretrained(folder)
    return model


def write_with_tokenizer(variant: str, folder: Path, **settings: int) -> transformers.PreTrainedModel:
    """Write a random checkpoint of a variant with the tokenizer of the bundled model; `settings` of its config."""
    config = VARIANTS[variant]()
    for name, value in {"vocab_size": N_PIECES, **settings}.items():
        setattr(config, name, value)
    model = write_checkpoint(config, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED_MODEL / name, folder)
    return model


def randomise(model: transformers.PreTrainedModel) -> None:
    """Give every tensor random values."""
    with torch.no_grad():
        corrections = (named for named in model.named_buffers() if "correction" in named[0])
        for name, tensor in (*model.named_parameters(), *corrections):
            noise = torch.randn(tensor.shape)
            if tensor.dim() > 1:
                tensor.copy_(noise * 0.15)
            else:
                tensor.copy_(noise * 0.3 + (1.0 if "weight" in name else 0.0))


def prompt(n: int = N_TOKENS, vocab_size: int = 99, seed: int = 3) -> list[int]:
    return torch.randint(0, vocab_size, (n,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference_logits(model: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Return transformers' logits [n, vocab_size] of one full prefill."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].float()
