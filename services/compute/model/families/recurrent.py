"""Architectures with a recurrent state beside the KV cache, which no worker serves, and what to serve instead."""

from __future__ import annotations

from collections.abc import Mapping

_STATE = (
    "its {layers} keep a state that every token changes, not keys and values of each token; the cache holds blocks of "
    "tokens, which requests share, lose and get back, and a state cannot be cut into those"
)
_REASONS = {
    "delta": _STATE.format(layers="gated delta rules"),
    "space": _STATE.format(layers="state-space layers"),
    "rnn": _STATE.format(layers="recurrences"),
    "conv": "its short convolutions need their inputs of the last tokens, which are of another size than the keys and "
    "values of the layers between; the cache has entries of one size for all layers, so its blocks cannot bring those "
    "inputs to a request that shares them or goes on elsewhere",
}
# By architecture: why, and a model of about that size that is served.
_REFUSED = {
    "Qwen3NextForCausalLM": ("delta", "Qwen3-30B-A3B (qwen3_moe)"),
    "KimiLinearForCausalLM": ("delta", "Moonlight-16B-A3B (deepseek_v3)"),
    "Lfm2ForCausalLM": ("conv", "Qwen3-0.6B or 1.7B (qwen3), SmolLM2 (llama)"),
    "Lfm2MoeForCausalLM": ("conv", "OLMoE-1B-7B (olmoe)"),
    "MambaForCausalLM": ("space", "Pythia (gpt_neox)"),
    "Mamba2ForCausalLM": ("space", "Pythia (gpt_neox)"),
    "FalconMambaForCausalLM": ("space", "Falcon3-7B (llama)"),
    "FalconH1ForCausalLM": ("space", "Falcon3 (llama)"),
    "JambaForCausalLM": ("space", "Mixtral-8x7B (mixtral)"),
    "BambaForCausalLM": ("space", "Granite 3.3 (granite)"),
    "GraniteMoeHybridForCausalLM": ("space", "Granite 3.3 (granite) or 3.1 MoE (granitemoe)"),
    "NemotronHForCausalLM": ("space", "Minitron (nemotron)"),
    "Zamba2ForCausalLM": ("space", "Qwen2.5 (qwen2)"),
    "RecurrentGemmaForCausalLM": ("rnn", "Gemma 2 (gemma2)"),
    "RwkvForCausalLM": ("rnn", "Pythia (gpt_neox)"),
}
RECURRENT: Mapping[str, str] = {
    name: f"{_REASONS[kind]}. Served instead: {instead}" for name, (kind, instead) in _REFUSED.items()
}
