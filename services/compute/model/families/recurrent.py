"""Architectures whose layers with a state no worker computes, and what to serve instead."""

from __future__ import annotations

from collections.abc import Mapping

_LAYERS = {
    "space": "layers around state spaces",
    "rnn": "recurrences",
    "alone": "recurrences, which transformers has no code for to compare with,",
}
# By architecture: why, and a model of about that size that is served.
_REFUSED = {
    "ZambaForCausalLM": ("space", "Zamba 2 (zamba2)"),
    "RecurrentGemmaForCausalLM": ("rnn", "Gemma 2 (gemma2)"),
    "RwkvForCausalLM": ("rnn", "Pythia (gpt_neox)"),
    "RWKV7ForCausalLM": ("alone", "Falcon-H1 (falcon_h1), LFM2 (lfm2)"),
}
RECURRENT: Mapping[str, str] = {
    name: f"its {_LAYERS[kind]} are not computed here. Served instead: {instead}"
    for name, (kind, instead) in _REFUSED.items()
}
