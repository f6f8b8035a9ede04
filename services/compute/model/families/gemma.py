"""Gemma 1, 2 and 3 (text): norms that add one to their weight, scaled embeddings, alternating windows."""

from __future__ import annotations

import math
from dataclasses import replace

from services.compute.model.families.config import Config
from services.compute.model.families.llama import ACTIVATIONS, base_spec
from services.compute.model.families.naming import Family, LayerNames, Refs, standard_refs
from services.compute.model.families.rope import read_ropes
from services.compute.model.families.windows import FULL, SLIDING, read_layer_types, with_windows
from services.compute.model.spec import LayerSpec, ModelSpec, RopeSpec

_SANDWICH = LayerNames(
    attn_post_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_post_norm="post_feedforward_layernorm",
)


def _common(config: Config, family: str, ropes: dict[str, RopeSpec] | None = None) -> ModelSpec:
    spec = base_spec(config, family, ropes=ropes, tied=True, attention_bias=False)
    config.raw("hidden_act")  # hidden_activation overrides it
    return replace(
        spec,
        norm_offset=1.0,
        activation=config.choice("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
        embedding_scale=math.sqrt(spec.hidden_size),
    )


def _with_softcap(config: Config, spec: ModelSpec) -> ModelSpec:
    return replace(
        spec,
        post_norm=True,
        attention_scale=config.number("query_pre_attn_scalar") ** -0.5,
        logit_softcap=config.optional_number("final_logit_softcapping"),
    )


def read_gemma(config: Config) -> ModelSpec:
    """Read a Gemma 1 config.json. Raises ModelError."""
    spec = _common(config, "gemma")
    if config.raw("hidden_activation") is not None:
        return spec
    # Published with "gelu" by mistake; training and all programs use the approximation by tanh.
    choices = {**ACTIVATIONS, "gelu": ACTIVATIONS["gelu_pytorch_tanh"]}
    return replace(spec, activation=config.choice("hidden_act", choices, "gelu_pytorch_tanh"))


def read_gemma2(config: Config) -> ModelSpec:
    """Read a Gemma 2 config.json. Raises ModelError."""
    config.fill_absent(attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
    spec = _with_softcap(config, _common(config, "gemma2"))
    spec = replace(spec, attention_softcap=config.optional_number("attn_logit_softcapping"))
    default = [FULL if index % 2 else SLIDING for index in range(spec.n_layers)]
    return replace(spec, layers=with_windows(config, spec, read_layer_types(config, spec.n_layers, default)))


def read_gemma3(config: Config) -> ModelSpec:
    """Read a Gemma 3 text config.json. Raises ModelError."""
    n_layers, ropes = config.integer("num_hidden_layers"), _gemma3_ropes(config)
    spec = _with_softcap(config, _common(config, "gemma3_text", ropes={"": ropes[FULL]}))
    config.pass_over("attn_logit_softcapping")  # transformers has the key and does not use it
    pattern = config.integer("sliding_window_pattern", 6)
    default = [SLIDING if (index + 1) % pattern else FULL for index in range(n_layers)]
    kinds = read_layer_types(config, n_layers, default)
    spec = replace(spec, qk_norm="head", layers=tuple(LayerSpec(rope=ropes[kind]) for kind in kinds))
    if config.flag("use_bidirectional_attention", False):  # EmbeddingGemma, whose window has two sides
        config.override("sliding_window", config.integer("sliding_window", 512) // 2 + 1)
        spec = replace(spec, bidirectional=True, generates=False)
    return replace(spec, layers=with_windows(config, spec, kinds))


def _gemma3_ropes(config: Config) -> dict[str, RopeSpec]:
    """Return the rope of both kinds of layers; transformers 4 spells the local one rope_local_base_freq."""
    ropes = read_ropes(config, config.integer("head_dim"), default_theta=1e6)
    config.raw("rope_local_base_freq")  # with both spellings, transformers reads the newer one
    if "" not in ropes:
        if set(ropes) != {FULL, SLIDING}:
            raise config.error("rope_parameters", f"expected {FULL!r} and {SLIDING!r}, found {sorted(ropes)}")
        return ropes
    local = RopeSpec(config.number("rope_local_base_freq", 1e4), ropes[""].rotary_dim)
    return {FULL: ropes[""], SLIDING: local}


def sandwich_refs(spec: ModelSpec) -> Refs:
    """Name Gemma 2's and 3's tensors."""
    return standard_refs(spec, _SANDWICH)


GEMMA = Family("GemmaForCausalLM", "gemma", read_gemma, standard_refs)
GEMMA2 = Family("Gemma2ForCausalLM", "gemma2", read_gemma2, sandwich_refs)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    "gemma3_text",
    read_gemma3,
    sandwich_refs,
    base="Gemma3TextModel",
    classifying="Gemma3TextForSequenceClassification",
)
