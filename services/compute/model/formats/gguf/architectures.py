"""The architectures of GGUF that are served: the hub's name, the keys, and how tensors are stored. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_RMS_NORM, _LAYER_NORM = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
# Keys of config.json by those of GGUF after the architecture's name.
_SIZES = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_LLAMA = _SIZES | {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    _RMS_NORM: "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_FINAL_SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}
_SOFTCAPS = _FINAL_SOFTCAP | {"attn_logit_softcapping": "attn_logit_softcapping"}
_EXPERTS = {"expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size"}
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
# Of layers with a state. Attention that is left out of some of them has no KV heads there.
_SOME_ATTEND = ("attention.head_count_kv",)
_SSM = {"ssm.conv_kernel": "mamba_d_conv", "ssm.state_size": "mamba_d_state"}
_MAMBA = _SSM | {"ssm.time_step_rank": "mamba_dt_rank"}
_MAMBA2 = _SSM | {"ssm.time_step_rank": "mamba_n_heads", "ssm.group_count": "mamba_n_groups"}
_DELTA = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}
_INTERVAL = {"full_attention_interval": "full_attention_interval"}
_SHARED_EXPERT = {
    "expert_count": "num_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_SECTIONS = "rope.dimension_sections"  # which numbers of a head turn by a place in an image: in texts all are one
_SSM_BIASES = {"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"}
_LONE_EXPERTS = {  # experts without a gate, in layers of their own
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
}
_GROUPS = {"expert_group_count": "n_group", "expert_group_used_count": "topk_group"}
_UNMIXED = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers", _RMS_NORM: "layer_norm_epsilon"}
_ROPE = ("rope.dimension_count", "rope.freq_base")  # written by converters for attention that has no rope
_NO_ROPE = {key: name for key, name in _LLAMA.items() if key != "rope.freq_base"}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One `general.architecture`."""

    hub: str  # its architecture in config.json
    keys: Mapping[str, str] = field(default_factory=lambda: _LLAMA)
    constants: Mapping[str, Any] = field(default_factory=dict)  # values of config.json that GGUF does not store
    needed: tuple[str, ...] = (_RMS_NORM,)  # keys that llama.cpp requires, and for which a family has a default
    absent: Mapping[str, Any] = field(default_factory=dict)  # llama.cpp's values of absent keys, besides those of all
    passed: tuple[str, ...] = ()  # keys without an effect, neither in llama.cpp nor in transformers
    period: int = 0  # every how many layers one has no window; 0: layers do not alternate
    biases: Mapping[str, str] = field(default_factory=dict)  # flags of config.json, by a layer's tensor that shows them
    sparse: tuple[str, ...] = ()  # keys whose lists have a 0 for each layer without that part
    names: Mapping[str, str] = field(default_factory=dict)  # exceptional names of modules, by ours
    scaled: bool = False  # factors of the hub's config, which no key holds, are part of the stored matrices
    paired: bool = False  # rows of q and k are in the order of an interleaved rope
    partial: str = ""  # key of config.json for the rotated part of a head; "": whole heads
    one_qkv: bool = False  # q, k and v are one tensor
    one_gate_up: bool = False  # gate and up are one tensor
    tiled: bool = False  # value heads of a key head lie apart, and the two numbers of each are two tensors


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", biases=_BIASES, paired=True),
    "mixtral": Architecture(  # a llama with experts
        "MixtralForCausalLM",
        _LLAMA | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        needed=(_RMS_NORM, "expert_used_count"),
        paired=True,
    ),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3moe": Architecture(
        "Qwen3MoeForCausalLM", _LLAMA | _EXPERTS | {"expert_count": "num_experts"}, {"norm_topk_prob": True}
    ),
    "gemma": Architecture("GemmaForCausalLM"),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        _LLAMA | _WINDOW | _SOFTCAPS,
        absent={"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "attention.sliding_window": 4096},
        period=2,
    ),
    "gemma3": Architecture(
        "Gemma3ForCausalLM", _LLAMA | _WINDOW | _FINAL_SOFTCAP, passed=("attn_logit_softcapping",), period=6
    ),
    "phi3": Architecture(
        "Phi3ForCausalLM", _LLAMA | _WINDOW, partial="partial_rotary_factor", one_qkv=True, one_gate_up=True
    ),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "smollm3": Architecture("SmolLM3ForCausalLM", paired=True),
    "granite": Architecture(
        "GraniteForCausalLM",
        _LLAMA | _SCALES,
        needed=(_RMS_NORM, "logit_scale"),
        biases=_BIASES,
        paired=True,
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _SIZES | {_LAYER_NORM: "layer_norm_epsilon"},
        {"activation_function": "gelu_new"},
        needed=(_LAYER_NORM,),
        one_qkv=True,
    ),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        _SIZES
        | {
            _LAYER_NORM: "layer_norm_eps",
            "use_parallel_residual": "use_parallel_residual",
            "rope.freq_base": "rotary_emb_base",
        },
        needed=(_LAYER_NORM, "use_parallel_residual"),
        partial="rotary_pct",
        one_qkv=True,
    ),
    "lfm2": Architecture(
        "Lfm2ForCausalLM",
        _LLAMA | {"shortconv.l_cache": "conv_L_cache"},
        {"block_auto_adjust_ff_dim": False},
        needed=(_RMS_NORM, "shortconv.l_cache"),
        sparse=_SOME_ATTEND,
        names={"norm": "token_embd_norm"},
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM",
        _LLAMA
        | _EXPERTS
        | {
            "shortconv.l_cache": "conv_L_cache",
            "expert_count": "num_experts",
            "leading_dense_block_count": "num_dense_layers",
        },
        needed=(_RMS_NORM, "shortconv.l_cache", "leading_dense_block_count"),
        sparse=_SOME_ATTEND,
        names={"norm": "token_embd_norm"},
    ),
    "granitehybrid": Architecture(
        "GraniteMoeHybridForCausalLM",
        _LLAMA
        | _SCALES
        | _MAMBA2
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        needed=(_RMS_NORM, *_MAMBA2),
        biases={"attention_bias": "attn_q.bias"} | _SSM_BIASES,
        paired=True,
        sparse=_SOME_ATTEND,
    ),
    "falcon-h1": Architecture(
        "FalconH1ForCausalLM",
        _LLAMA | _MAMBA2 | {"ssm.inner_size": "mamba_d_ssm"},
        {"mamba_norm_before_gate": False},
        needed=(_RMS_NORM, *_MAMBA2, "ssm.inner_size"),
        biases={"mamba_rms_norm": "ssm_norm.weight", "mamba_conv_bias": "ssm_conv1d.bias", "mlp_bias": "ffn_up.bias"},
        names={"mlp_norm.weight": "ffn_norm"},
        scaled=True,
    ),
    "nemotron_h": Architecture(
        "NemotronHForCausalLM",
        _NO_ROPE | _MAMBA2 | {_RMS_NORM: "layer_norm_epsilon"},
        needed=(_RMS_NORM, *_MAMBA2),
        biases={"mlp_bias": "ffn_up.bias"} | _SSM_BIASES,
        sparse=(*_SOME_ATTEND, "feed_forward_length"),
        passed=_ROPE,
        names={"mlp_norm": "attn_norm"},
    ),
    "nemotron_h_moe": Architecture(
        "NemotronHForCausalLM",
        _NO_ROPE
        | _MAMBA2
        | _LONE_EXPERTS
        | _GROUPS
        | {_RMS_NORM: "layer_norm_epsilon", "expert_shared_count": "n_shared_experts"},
        needed=(_RMS_NORM, *_MAMBA2, *_LONE_EXPERTS),
        biases=_SSM_BIASES,
        sparse=(*_SOME_ATTEND, "feed_forward_length"),
        passed=_ROPE,
        names={"mlp_norm": "attn_norm"},
    ),
    "jamba": Architecture(
        "JambaForCausalLM",
        _NO_ROPE | _MAMBA | {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        needed=(_RMS_NORM, *_MAMBA),
        biases=_SSM_BIASES,
        sparse=_SOME_ATTEND,
        passed=_ROPE,
    ),
    "mamba": Architecture(
        "MambaForCausalLM",
        _UNMIXED | _MAMBA,
        needed=(_RMS_NORM, *_MAMBA),
        passed=("context_length",),
        biases=_SSM_BIASES,
    ),
    "falconmamba": Architecture(  # a mamba whose steps, b and c are normalised
        "FalconMambaForCausalLM",
        _UNMIXED | _MAMBA,
        needed=(_RMS_NORM, *_MAMBA),
        passed=("context_length", "ssm.dt_b_c_rms"),
        biases=_SSM_BIASES,
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        _UNMIXED | _MAMBA2,
        needed=(_RMS_NORM, *_MAMBA2),
        passed=("context_length",),
        biases=_SSM_BIASES,
    ),
    "qwen3next": Architecture(
        "Qwen3NextForCausalLM",
        _LLAMA | _EXPERTS | _DELTA | _INTERVAL | _SHARED_EXPERT,
        {"norm_topk_prob": True},
        needed=(_RMS_NORM, *_DELTA),
        partial="partial_rotary_factor",
        names={"mlp_norm": "post_attention_norm"},
    ),
    "qwen35": Architecture(
        "Qwen3_5ForCausalLM",
        _LLAMA | _DELTA | _INTERVAL,
        needed=(_RMS_NORM, *_DELTA),
        passed=(_SECTIONS,),
        partial="partial_rotary_factor",
        names={"mlp_norm": "post_attention_norm"},
        tiled=True,
    ),
    "qwen35moe": Architecture(
        "Qwen3_5MoeForCausalLM",
        _LLAMA | _EXPERTS | _DELTA | _INTERVAL | _SHARED_EXPERT,
        {"norm_topk_prob": True},
        needed=(_RMS_NORM, *_DELTA),
        passed=(_SECTIONS,),
        partial="partial_rotary_factor",
        names={"mlp_norm": "post_attention_norm"},
        tiled=True,
    ),
}
