"""Every switch of the spec matters: with one of them wrong, the comparison with transformers fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest

from services.compute.backends.shapes import ExpertRouting
from services.compute.model.mixers import DeltaNet, Lightning, Mamba, Mamba2, ShortConv
from services.compute.model.spec import (
    LatentSpec,
    LayerSpec,
    ModelError,
    ModelSpec,
    MoeSpec,
    QueryScale,
    RopeSpec,
    SharedBlock,
    SumFactors,
)
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.harness import CachedDecoder, load_changed
from tests.unit.compute.model.test_encoders import SWITCHES as _OF_ENCODERS

# (variant, switch, wrong value)
_MODEL: list[tuple[str, str, Any]] = [
    ("llama", "vocab_size", 100),
    ("llama", "hidden_size", 40),
    ("llama", "ffn_size", 32),
    ("llama", "n_heads", 2),
    ("llama", "n_kv_heads", 4),
    ("llama", "head_dim", 24),
    ("gpt2", "max_positions", 64),
    ("gpt2", "norm", "rms"),
    ("llama", "norm_eps", 0.1),
    ("gemma", "norm_offset", 0.0),
    ("llama", "pre_norm", False),
    ("gemma2", "post_norm", False),
    ("gpt_neox", "parallel_residual", False),
    ("gpt_neox", "shared_norm", True),
    ("falcon", "shared_norm", False),
    ("nemotron", "norm_offset", 0.0),
    ("bloom", "embed_norm", False),
    ("bloom", "alibi", False),
    ("arcee", "activation", "relu"),
    ("hunyuan_v1_dense", "qk_norm_rotated", False),
    ("phi", "head_bias", False),
    ("qwen3", "qk_norm", None),
    ("qwen3", "qk_norm", "full"),
    ("olmo2", "qk_norm", "head"),
    ("gpt2", "learned_positions", False),
    ("qwen2", "qkv_bias", False),
    ("gpt2", "o_bias", False),
    ("gpt2", "mlp_bias", False),
    ("gpt2", "norm_bias", False),
    ("llama", "mlp", "plain"),
    ("llama", "activation", "gelu"),
    ("gpt2", "activation", "gelu"),
    ("gemma", "activation", "silu"),
    ("gpt2_unscaled_wide", "activation", "silu"),
    ("llama", "tied", True),
    ("granite", "attention_scale", 0.25),
    ("gemma2", "attention_softcap", None),
    ("llama4", "qk_norm", None),
    ("bitnet", "sub_norm", False),
    ("bitnet", "activation", "relu"),
    ("apertus", "activation", "relu2"),
    ("gpt_oss", "activation", "silu"),
    ("gpt_oss", "sinks", False),
    ("qwen3_5", "attention_gate", False),
    ("deepseek_v2", "latent", LatentSpec(rank=24, query_rank=0, nope_dim=10, rope_dim=8, value_dim=10)),
    ("gemma2", "logit_softcap", None),
    ("gemma", "embedding_scale", 1.0),
    ("granite", "logit_scale", 1.0),
    ("falcon_h1", "attention_factor", 1.0),
    ("falcon_h1", "mixer_factor", 1.0),
    ("falcon_h1", "gate_factor", 1.0),
    ("falcon_h1", "down_factor", 1.0),
]
_ROPE: list[tuple[str, str, Any]] = [
    ("llama", "theta", 20_000.0),
    ("phi3_partial", "rotary_dim", 12),
    ("llama_linear", "kind", "default"),
    ("llama_llama3", "kind", "linear"),
    ("llama_yarn", "kind", "linear"),
    ("phi3_longrope", "kind", "default"),
    ("llama_linear", "factor", 2.0),
    ("llama_yarn", "original_max_positions", 64),
    ("llama_llama3", "low_freq_factor", 2.0),
    ("llama_llama3", "high_freq_factor", 8.0),
    ("llama_yarn", "beta_fast", 2.0),
    ("llama_yarn_mscale", "beta_slow", 0.01),
    ("llama_yarn", "truncate", False),
    ("llama_yarn_mscale", "attention_factor", 1.0),
    ("phi3_longrope_short", "short_factors", (1.0,) * 6),
    ("phi3_longrope", "long_factors", (1.0,) * 6),
    ("phimoe_longrope", "long_attention_factor", None),
]
_MOE: list[tuple[str, str, Any]] = [
    ("mixtral", "n_experts", 3),
    ("mixtral", "ffn_size", 32),
    ("mixtral", "routing", ExpertRouting(n_active=1, normalise=True)),
    ("qwen2_moe", "shared_size", 20),
    ("qwen2_moe", "shared_gate", False),
    ("gpt_oss", "bias", False),
]
_ROUTING: list[tuple[str, str, Any]] = [
    ("mixtral", "n_active", 1),
    ("qwen3_moe", "normalise", False),
    ("qwen3_moe_unnormalised", "normalise", True),
    ("glm4_moe", "scores", "softmax"),
    ("glm4_moe", "corrected", False),
    ("glm4_moe", "n_groups", 1),
    ("glm4_moe", "n_kept_groups", 2),
    ("glm4_moe", "group_score", "max"),
    ("glm4_moe", "scale", 1.0),
    ("phimoe", "scores", "softmax"),
    ("phimoe", "jitter", 0.05),
    ("llama4", "on_inputs", False),
]
_LAYER: list[tuple[str, str, Any]] = [
    ("mistral", "window", None),
    ("mistral", "window", 14),
    ("llama4", "chunk", None),
    ("llama4", "chunk", 24),
    ("llama", "rope", None),
    ("ministral3", "query_scale", None),
    ("mixtral", "moe", None),
    ("lfm2", "mixer", ShortConv(48, 3, bias=True)),
    ("lfm2", "attends", True),
    ("lfm2", "has_mlp", False),
    ("zamba2", "block", None),
    ("granite", "mixing_sum", SumFactors()),
    ("granite", "mlp_sum", SumFactors()),
    ("minimax", "mlp_sum", SumFactors(alpha=3.4)),
    ("minimax", "mlp_sum", SumFactors(beta=1.3)),
]
_SCALE: list[tuple[str, str, Any]] = [("ministral3", "beta", 0.4), ("ministral3", "period", 17), ("llama4", "first", 0)]
_LATENT: list[tuple[str, str, Any]] = [
    ("deepseek_v3", "rank", 20),
    ("deepseek_v3", "query_rank", 0),
    ("deepseek_v3", "nope_dim", 10),
    ("deepseek_v3", "rope_dim", 4),
    ("deepseek_v3", "value_dim", 8),
]
_CONVOLUTION: list[tuple[str, str, Any]] = [
    ("lfm2", "size", 40),
    ("lfm2", "kernel", 2),
    ("lfm2_biased", "bias", False),
]
_MAMBA: list[tuple[str, str, Any]] = [
    ("mamba", "size", 48),
    ("mamba", "n_states", 4),
    ("mamba", "step_rank", 2),
    ("mamba", "kernel", 3),
    ("mamba", "conv_bias", False),
    ("mamba", "bias", False),
    ("jamba", "norms", "unit"),
    ("falcon_mamba", "norms", "none"),
    ("falcon_mamba", "norm_eps", 0.1),
]
_LIGHTNING: list[tuple[str, str, Any]] = [
    ("minimax", "n_heads", 2),
    ("minimax", "head_dim", 6),
    ("minimax", "slope", 0.5),
]
_BLOCK: list[tuple[str, str, Any]] = [
    ("zamba2", "number", 0),
    ("zamba2", "rank", 5),
    ("zamba2", "attention_rank", 0),
]
_DELTA: list[tuple[str, str, Any]] = [
    ("qwen3_next", "n_key_heads", 2),
    ("qwen3_next", "n_value_heads", 4),
    ("qwen3_next", "key_dim", 6),
    ("qwen3_5", "value_dim", 5),
    ("qwen3_5", "kernel", 3),
    ("kimi_linear", "rank", 5),
]
_MAMBA2: list[tuple[str, str, Any]] = [
    ("mamba2", "n_heads", 4),
    ("mamba2", "head_dim", 6),
    ("mamba2", "n_groups", 2),
    ("mamba2", "n_states", 8),
    ("mamba2", "kernel", 3),
    ("bamba", "conv_bias", False),
    ("bamba_groups", "bias", False),
    ("nemotron_h", "least_step", 0.8),
    ("falcon_h1_normed", "gate", "inside"),
    ("falcon_h1", "factors", ()),
]
# Not part of the computation; how weights are stored has its own tests (tests/unit/compute/model/formats).
_DESCRIPTIVE = {
    *("family", "left_out", "dtype", "eos_token_ids", "layers", "generates", "quantization"),
    *("vision", "axes"),  # test_vision.py, test_grid_vision.py
    *("in_layers", "in_tables"),  # shares of a file's types, for the prediction of memory
}


def _agrees(sample: Sample, mutate: Callable[[ModelSpec], ModelSpec]) -> bool:
    model = load_changed(sample.folder, mutate)
    logits = model.logits(CachedDecoder(model).run(sample.ids, [30]))[:, : sample.logits.shape[1]]
    return bool((logits - sample.logits).abs().max() <= 1e-4)


def _must_fail(sample: Sample, mutate: Callable[[ModelSpec], ModelSpec]) -> None:
    try:
        agrees = _agrees(sample, mutate)
    except ModelError:  # a tensor is missing, left over or of another shape
        return
    assert not agrees


def _changed(part: Any, path: Sequence[str], wrong: Any) -> Any:
    """Replace the field that `path` leads to, in each part of a tuple; a part that is None stays."""
    if isinstance(part, tuple):
        return tuple(_changed(each, path, wrong) for each in part)
    name, *rest = path
    return part and replace(part, **{name: _changed(getattr(part, name), rest, wrong) if rest else wrong})


_MIXERS = (*_CONVOLUTION, *_MAMBA2, *_DELTA, *_MAMBA, *_LIGHTNING)
_TABLES: dict[tuple[str, ...], Sequence[tuple[str, str, Any]]] = {  # by the path to their switches
    (): _MODEL,
    ("layers", "rope"): _ROPE,
    ("layers", "moe"): _MOE,
    ("layers", "moe", "routing"): _ROUTING,
    ("layers",): _LAYER,
    ("layers", "mixer"): _MIXERS,
    ("layers", "block"): _BLOCK,
    ("layers", "query_scale"): _SCALE,
    ("latent",): _LATENT,
}
_CASES = [(variant, (*at, switch), wrong) for at, table in _TABLES.items() for variant, switch, wrong in table]


@pytest.mark.parametrize("variant", sorted({"gemma3", "smollm3", *(variant for variant, _, _ in _CASES)}))
def test_unchanged_spec_agrees(variant: str, sample: Callable[[str], Sample]) -> None:
    assert _agrees(sample(variant), lambda spec: spec)


@pytest.mark.parametrize(("variant", "path", "wrong"), _CASES, ids=lambda value: str(value)[:40])
def test_wrong_switch_changes_the_logits(
    variant: str, path: tuple[str, ...], wrong: Any, sample: Callable[[str], Sample]
) -> None:
    _must_fail(sample(variant), lambda spec: _changed(spec, path, wrong))


@pytest.mark.parametrize("variant", ["gemma3", "smollm3"])
def test_layers_of_one_model_may_differ(variant: str, sample: Callable[[str], Sample]) -> None:
    """Gemma 3 has a rope and a window for each kind of layer, SmolLM 3 a rope for one: exchanging kinds must show."""
    _must_fail(sample(variant), lambda spec: replace(spec, layers=spec.layers[1:] + spec.layers[:1]))


def test_no_switch_is_left_out() -> None:
    for kind, table in {
        ModelSpec: [*_MODEL, *_OF_ENCODERS],
        RopeSpec: _ROPE,
        MoeSpec: _MOE,
        ExpertRouting: _ROUTING,
        LayerSpec: _LAYER,
        QueryScale: _SCALE,
        LatentSpec: _LATENT,
        ShortConv: _CONVOLUTION,
        Mamba2: _MAMBA2,
        DeltaNet: _DELTA,
        Mamba: _MAMBA,
        Lightning: _LIGHTNING,
        SharedBlock: _BLOCK,
    }.items():
        mutated = {switch for _, switch, _ in table}
        assert {field.name for field in fields(kind)} - _DESCRIPTIVE == mutated
