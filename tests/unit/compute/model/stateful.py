"""Variants with a state outside the KV cache: short convolutions, state spaces, delta rules, lightning attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers

Make = Callable[..., Callable[[], transformers.PretrainedConfig]]

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 32}
SHARED_EXPERT: dict[str, Any] = {**EXPERTS, "shared_expert_intermediate_size": 40}
_LAYERS4: dict[str, Any] = {"num_hidden_layers": 4}
_MAMBA2: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 12, "mamba_d_state": 16, "mamba_chunk_size": 16}
_ZAMBA2: dict[str, Any] = {
    "num_hidden_layers": 6,
    "n_mamba_heads": 8,
    "mamba_d_state": 16,
    "chunk_size": 16,
    "adapter_rank": 10,
}
_FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 96,
    "mlp_multipliers": [0.8, 1.3],
    "ssm_multipliers": [1.2, 0.7, 0.9, 1.1, 0.6],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.6,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.9,
    "key_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.3,
}
_NEMOTRON_H: dict[str, Any] = {
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 10,
    "ssm_state_size": 16,
    "n_groups": 4,
    "chunk_size": 16,
}
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
}
_KIMI: dict[str, Any] = {
    **_LAYERS4,
    "num_key_value_heads": 4,
    "linear_head_dim": 10,
    "linear_num_heads": 4,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}


def variants(
    make: Make, multimodal: Make, moe: dict[str, Any], multipliers: dict[str, Any], mrope: dict[str, Any]
) -> dict[str, Callable[[], transformers.PretrainedConfig]]:
    """The variants, of configurations that the arguments make as those of other variants."""
    return {
        "lfm2": make(
            "Lfm2Config", **_LAYERS4, layer_types=["conv", "full_attention", "conv", "conv"], block_multiple_of=16
        ),
        "lfm2_biased": make(
            "Lfm2Config",
            **_LAYERS4,
            layer_types=["full_attention", "conv", "conv", "full_attention"],
            conv_bias=True,
            conv_L_cache=4,
            block_auto_adjust_ff_dim=False,
        ),
        "lfm2_moe": make(
            "Lfm2MoeConfig",
            **_LAYERS4,
            layer_types=["conv", "full_attention", "conv", "conv"],
            num_dense_layers=1,
            **EXPERTS,
            routed_scaling_factor=1.7,
        ),
        "mamba2": make("Mamba2Config"),
        "zamba2": make(
            "Zamba2Config",
            **{**_ZAMBA2, "num_key_value_heads": 4},
            layers_block_type=[*["linear_attention"] * 3, *["hybrid"] * 3],
            num_mem_blocks=2,
            use_mem_rope=True,
            use_shared_attention_adapter=True,
            time_step_min=0.4,
        ),
        "zamba2_biased": make(
            "Zamba2Config",
            **{**_ZAMBA2, "num_hidden_layers": 4, "mamba_ngroups": 4},
            layers_block_type=[*["linear_attention"] * 2, *["hybrid"] * 2],
            add_bias_linear=True,
        ),
        "minimax": make(
            "MiniMaxConfig",
            **{**moe, "num_hidden_layers": 3},
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            block_size=16,
            sliding_window=13,
            full_attn_alpha_factor=1.6,
            full_attn_beta_factor=0.7,
            linear_attn_alpha_factor=2.4,
            linear_attn_beta_factor=1.2,
            mlp_alpha_factor=3.4,
            mlp_beta_factor=1.3,
        ),
        "nemotron_h": make(
            "NemotronHConfig",
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
            **_NEMOTRON_H,
            mlp_bias=True,
            use_bias=True,
        ),
        "nemotron_h_moe": make(
            "NemotronHConfig",
            layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
            **_NEMOTRON_H,
            n_routed_experts=8,
            n_group=4,
            topk_group=2,
            num_experts_per_tok=3,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=40,
            routed_scaling_factor=2.5,
        ),
        "qwen3_next": make("Qwen3NextConfig", **_DELTA, **SHARED_EXPERT, mlp_only_layers=[1]),
        "qwen3_5": make("Qwen3_5TextConfig", **_DELTA, tie_word_embeddings=True),
        "qwen3_5_moe": make(
            "Qwen3_5MoeTextConfig",
            **{**_DELTA, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"]},
            **SHARED_EXPERT,
        ),
        "kimi_linear": make(
            "KimiLinearConfig",
            **_KIMI,
            layer_types=["linear_attention", "full_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["dense", "sparse", "dense", "sparse"],
            n_group=4,
            topk_group=2,
        ),
        "kimi_linear_published": make(
            "KimiLinearConfig",
            **_KIMI,
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
            mlp_layer_types=["dense", "dense", "sparse", "sparse"],
            q_lora_rank=20,
        ),
        "mamba": make("MambaConfig", state_size=8, use_bias=True),
        "falcon_mamba": make("FalconMambaConfig", state_size=8, tie_word_embeddings=False),
        "jamba": make(
            "JambaConfig",
            **_LAYERS4,
            num_experts=4,
            num_experts_per_tok=2,
            attn_layer_period=3,
            attn_layer_offset=1,
            mamba_d_state=8,
            mamba_dt_rank=5,
        ),
        "qwen3_5_multimodal": multimodal("Qwen3_5", **_DELTA, **mrope),
        "qwen3_5_moe_multimodal": multimodal(
            "Qwen3_5Moe",
            **{**_DELTA, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
            **mrope,
            **SHARED_EXPERT,
        ),
        "falcon_h1": make("FalconH1Config", **_MAMBA2, **_FALCON_H1),
        "falcon_h1_normed": make(
            "FalconH1Config", **{**_MAMBA2, **_FALCON_H1, "mamba_n_groups": 2}, mamba_rms_norm=True, mlp_bias=True
        ),
        "bamba": make("BambaConfig", **_LAYERS4, **_MAMBA2, attn_layer_indices=[1]),
        "bamba_groups": make(
            "BambaConfig", **_LAYERS4, **{**_MAMBA2, "mamba_n_groups": 4}, attn_layer_indices=[3], mamba_proj_bias=True
        ),
        "granitemoehybrid": make(
            "GraniteMoeHybridConfig",
            **{**moe, **multipliers, **_LAYERS4, **_MAMBA2},
            shared_intermediate_size=40,
            layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        ),
        "granitemoehybrid_dense": make(
            "GraniteMoeHybridConfig",
            **{**multipliers, **_LAYERS4, **_MAMBA2},
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=40,
            position_embedding_type="rope",
            mamba_conv_bias=False,
            layer_types=["full_attention", "linear_attention", "linear_attention", "full_attention"],
        ),
    }
