"""config.json of published checkpoints: each is accepted, and means what transformers takes it for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from services.compute.model.families.config import Config
from services.compute.model.layers.rope import rope_tables
from services.compute.model.registry import FAMILIES, interpret
from services.compute.model.spec import ModelError, ModelSpec

DATA = Path(__file__).parent / "published"  # values as published, one model a line
PUBLISHED = [json.loads(line) for file in sorted(DATA.glob("*.jsonl")) for line in file.read_text().splitlines()]
# Families that transformers does not hold: one of the same keys.
_TWINS = {"internlm2": "llama", "internlm3": "llama", "minicpm": "llama"}
# Families with no published config.json at hand: their keys are those that transformers writes.
UNPUBLISHED = {
    *("arcee", "dots1", "exaone4", "glm", "hunyuan_v1_dense", "internlm3", "jais2", "llama4_text", "ministral3"),
    *("phimoe", "bamba", "zamba2", "smolvlm", "idefics3", "qwen3_5_moe_text", "qwen3_vl_moe"),
}
# Families whose layers keep a state: transformers describes them by keys of their own.
_STATES = {
    *("lfm2", "lfm2_moe", "granitemoehybrid", "falcon_h1", "mamba", "mamba2", "falcon_mamba", "jamba", "nemotron_h"),
    *("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "kimi_linear", "minimax"),
}
_PUBLISHERS = {"minimax_m1"}  # configurations in a spelling that transformers does not read
_FFN_SIZES = ("intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
_ROPES_BY_KIND = ("gemma3_text", "modernbert", "olmo3")
STATEFUL = [row for row in PUBLISHED if row["config"].get("model_type") in _STATES]
ATTENDING = [row for row in PUBLISHED if row["config"].get("model_type") not in _STATES | _PUBLISHERS]
NAMES = [row["name"] for row in ATTENDING]


def _read(values: dict[str, Any]) -> ModelSpec:
    return interpret(Config(values, Path("config.json")))[1]


def _reference(spec: ModelSpec, values: dict[str, Any]) -> Any:
    kind = values["model_type"] if "text_config" in values else spec.family
    return transformers.CONFIG_MAPPING[_TWINS.get(kind, kind)].from_dict(dict(values)).get_text_config()


@pytest.mark.parametrize("row", STATEFUL, ids=[row["name"] for row in STATEFUL])
def test_a_published_config_with_states_is_read_like_that_of_transformers(row: dict[str, Any]) -> None:
    """The config.json that transformers writes is compared with its logits elsewhere, for each family."""
    values = row["config"]
    config = transformers.CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
    spec, written = _read(values), _read(config.to_dict() | {"architectures": values["architectures"]})
    assert spec.has_state
    ends = spec.eos_token_ids or written.eos_token_ids  # which transformers makes up where there are none
    assert spec == replace(written, eos_token_ids=spec.eos_token_ids)
    assert ends == written.eos_token_ids


def test_minimax_in_the_spelling_of_its_publisher_is_that_of_transformers() -> None:
    """MiniMax M1 has the sizes of MiniMax Text 01."""
    by_name = {row["name"]: row["config"] for row in PUBLISHED}
    published, converted = (_read(by_name[f"MiniMaxAI/MiniMax-{name}"]) for name in ("M1", "Text-01-hf"))
    assert published == replace(converted, eos_token_ids=published.eos_token_ids)
    assert {layer.mixing_sum.alpha for layer in published.layers} == {3.5565588200778455}
    assert sum(layer.attends for layer in published.layers) == 10


@pytest.mark.parametrize("row", ATTENDING, ids=NAMES)
def test_a_published_config_is_read_like_transformers(row: dict[str, Any]) -> None:
    spec = _read(row["config"])
    expected = _reference(spec, row["config"])
    n_heads = expected.num_attention_heads
    head_dim = getattr(expected, "head_dim", None) or expected.hidden_size // n_heads
    n_kv_heads = getattr(expected, "num_key_value_heads", None) or n_heads
    if getattr(expected, "multi_query", False):  # falcon
        n_kv_heads = 1
    if spec.latent is not None:
        n_kv_heads, head_dim = 1, expected.kv_lora_rank + expected.qk_rope_head_dim
        assert (spec.latent.query_dim, spec.latent.value_dim) == (expected.qk_head_dim, expected.v_head_dim)
    assert (spec.n_layers, spec.hidden_size, spec.vocab_size, spec.n_heads, spec.head_dim, spec.n_kv_heads) == (
        expected.num_hidden_layers, expected.hidden_size, expected.vocab_size, n_heads, head_dim, n_kv_heads,
    )  # fmt: skip
    sizes = [getattr(expected, key, None) for key in _FFN_SIZES]
    assert spec.ffn_size == next((size for size in sizes if size), 4 * spec.hidden_size)
    keys = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    eps = [getattr(expected, key, None) for key in keys]
    assert spec.norm_eps == next((value for value in eps if value is not None), 1e-5)
    assert spec.tied == (expected.tie_word_embeddings or not spec.generates)
    kinds = getattr(expected, "layer_types", None)
    window = getattr(expected, "sliding_window", None)
    if spec.family == "modernbert":  # its number of keys on a side is without the row's own
        window = expected.local_attention // 2 + 1
    if spec.family in ("roberta", "xlm-roberta"):  # the first rows are those of padding
        assert spec.max_positions == expected.max_position_embeddings - expected.pad_token_id - 1
    if kinds is not None:
        assert [layer.window is not None for layer in spec.layers] == [kind == "sliding_attention" for kind in kinds]
    rotated = getattr(expected, "no_rope_layers", None)  # 1: it rotates
    if rotated is not None:
        assert [int(layer.rope is not None) for layer in spec.layers] == rotated
    mixed = hasattr(expected, "num_experts_per_tok")
    for index, layer in enumerate(spec.layers):
        assert layer.window in (None, window)
        assert (layer.moe is not None) == (mixed and index >= getattr(expected, "first_k_dense_replace", 0))
        if layer.moe is not None:
            size = getattr(expected, "moe_intermediate_size", expected.intermediate_size)
            n_experts = getattr(expected, "num_local_experts", None) or expected.num_experts
            assert (layer.moe.n_experts, layer.moe.ffn_size) == (n_experts, size)
            assert layer.moe.routing.n_active == expected.num_experts_per_tok


@pytest.mark.parametrize("row", ATTENDING, ids=NAMES)
def test_a_published_rope_rotates_like_transformers(row: dict[str, Any]) -> None:
    """The angles of a few positions, of every kind of layer."""
    spec = _read(row["config"])
    expected = _reference(spec, row["config"])
    if spec.learned_positions or spec.alibi:
        assert not spec.ropes
        return
    if spec.family == "gptj":
        assert (spec.ropes[0].theta, spec.ropes[0].rotary_dim) == (10_000, expected.rotary_dim)
        return
    kinds = getattr(expected, "layer_types", None) if spec.family in _ROPES_BY_KIND else None
    for kind in sorted(set(kinds)) if kinds else [None]:
        rope = spec.layers[kinds.index(kind) if kinds else 0].rope
        assert rope is not None
        frequencies, scale = _transformers_rope(expected, kind)
        cos, _ = rope_tables(rope, 8)
        assert torch.allclose(cos, (torch.arange(8)[:, None] * frequencies).cos() * scale, atol=1e-5)


def _transformers_rope(expected: Any, kind: str | None) -> tuple[torch.Tensor, float]:
    parameters = expected.rope_parameters if kind is None else expected.rope_parameters[kind]
    name = parameters["rope_type"]
    if name in ("default", "mrope"):  # the latter's three positions of a text's token are equal
        dim = getattr(expected, "head_dim", None) or expected.hidden_size // expected.num_attention_heads
        size = int(dim * parameters.get("partial_rotary_factor", 1.0))
        return 1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size), 1.0
    layer = {} if kind is None else {"layer_type": kind}
    frequencies, scale = ROPE_INIT_FUNCTIONS[name](expected, torch.device("cpu"), seq_len=8, **layer)
    return frequencies, float(scale)


def test_every_family_has_published_configs() -> None:
    published = {interpret(Config(row["config"], Path("config.json")))[0].model_type for row in PUBLISHED}
    assert published | UNPUBLISHED == {family.model_type for family in FAMILIES.values()}
    assert not published & UNPUBLISHED
    assert len(PUBLISHED) >= 110


# Keys of the published ones at another value: each would change what is computed.
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("microsoft/Phi-4-mini-instruct", {"full_attn_mod": 2}),
        ("microsoft/Phi-4-mini-instruct", {"interpolate_factor": 2}),
        ("microsoft/Phi-4-mini-instruct", {"lm_head_bias": True}),
        ("microsoft/Phi-4-mini-instruct", {"mlp_bias": True}),
        ("microsoft/Phi-4-mini-instruct", {"attention_bias": True}),
        ("Qwen/Qwen2.5-0.5B", {"use_mrope": True}),
        ("HuggingFaceTB/SmolLM2-135M", {"rope_interleaved": True}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"qkv_bias": True}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"use_qk_norm": False}),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", {"shared_expert_intermediate_size": 512}),
        ("google/gemma-2-9b", {"sliding_window_size": 2048}),
        ("openai-community/gpt2-medium", {"n_special": 4}),
        ("smol-8x101-ft", {"attention_bias": True}),
        ("EleutherAI/pythia-6.9b-deduped (transformers 4.45)", {"rope_theta": 20000}),
        ("EleutherAI/pythia-6.9b-deduped (transformers 4.45)", {"partial_rotary_factor": 0.5}),
        ("google/gemma-2-9b", {"use_bidirectional_attention": True}),
        ("sentence-transformers/all-MiniLM-L6-v2", {"position_embedding_type": "relative_key"}),
        ("sentence-transformers/all-MiniLM-L6-v2", {"is_decoder": True}),
        ("FacebookAI/roberta-base", {"pad_token_id": 0}),
        ("BAAI/bge-m3", {"is_decoder": True}),
        ("answerdotai/ModernBERT-base", {"hidden_activation": "quick_gelu"}),
        ("meta-llama/Llama-2-7b-hf", {"is_causal": False}),
        ("meta-llama/Llama-2-7b-hf", {"layer_types": ["sliding_attention"] * 32}),
        ("meta-llama/Llama-2-7b-hf", {"residual_multiplier": 0.5}),
    ],
)
def test_a_known_key_at_another_value_is_refused_by_name(name: str, change: dict[str, Any]) -> None:
    values = next(row["config"] for row in PUBLISHED if row["name"] == name)
    (key, value) = next(iter(change.items()))
    with pytest.raises(ModelError) as refused:
        _read(values | change)
    assert f"{key}: {value!r} is not implemented" in str(refused.value)


def test_foreign_settings_are_accepted_when_off() -> None:
    values = next(row["config"] for row in PUBLISHED if row["name"] == "meta-llama/Llama-2-7b-hf")
    off = dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), 1.0)
    assert _read(values | off | {"layer_types": ["full_attention"] * 32}) == _read(values)


def test_all_rejected_values_are_named_at_once() -> None:
    values = next(row["config"] for row in PUBLISHED if row["name"] == "microsoft/Phi-4-mini-instruct")
    with pytest.raises(ModelError) as refused:
        _read(values | {"hidden_act": "quick_gelu", "mlp_bias": True, "twist": 3, "lean": 0.5})
    for problem in ("hidden_act: 'quick_gelu'", "mlp_bias: True", "twist: 3", "lean: 0.5"):
        assert problem in str(refused.value)
