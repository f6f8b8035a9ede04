"""config.json of transformers 4 and 5 means the same, and what is not implemented is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.compute.model.families.config import Config
from services.compute.model.registry import interpret, read_spec
from services.compute.model.spec import ModelError, ModelSpec
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.test_encoders import CONFIGS
from tests.unit.compute.model.zoo import VARIANTS

Json = dict[str, Any]


def _write(folder: Path, config: Json) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _read(sample: Sample) -> Json:
    config: Json = json.loads((sample.folder / "config.json").read_text())
    return config


def _as_version_4(config: Json) -> Json:
    """Spell a configuration as transformers 4 did."""
    old = dict(config)
    old["torch_dtype"] = old.pop("dtype")
    rope = old.pop("rope_parameters")
    if "full_attention" in rope:
        old["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    old["rope_theta"] = rope["rope_theta"]
    if "partial_rotary_factor" in rope:
        old["partial_rotary_factor"] = rope["partial_rotary_factor"]
    scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    old["rope_scaling"] = scaling if scaling["rope_type"] != "default" else None
    return old


@pytest.mark.parametrize(
    "variant",
    [
        *("llama", "llama_linear", "llama_dynamic", "llama_llama3", "llama_yarn", "mistral", "mixtral", "qwen3_moe"),
        *("gemma2", "gemma3", "phi3_longrope", "phi3_partial", "granite", "olmo2"),
    ],
)
def test_transformers_4_and_5_spell_the_same_model(
    variant: str, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    config = _read(sample(variant))
    assert read_spec(_write(tmp_path, _as_version_4(config))) == read_spec(sample(variant).folder)


def test_older_spellings(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    linear = _as_version_4(_read(sample("llama_linear")))
    linear["rope_scaling"] = {"type": "linear", "factor": 3.0}
    assert read_spec(_write(tmp_path, linear)) == read_spec(sample("llama_linear").folder)

    longrope = _as_version_4(_read(sample("phi3_longrope")))
    longrope["rope_scaling"]["type"] = "su"
    del longrope["rope_scaling"]["rope_type"]
    assert read_spec(_write(tmp_path, longrope)) == read_spec(sample("phi3_longrope").folder)

    neox = _as_version_4(_read(sample("gpt_neox")))
    neox["rotary_pct"], neox["rotary_emb_base"] = neox.pop("partial_rotary_factor"), neox.pop("rope_theta")
    assert read_spec(_write(tmp_path, neox)) == read_spec(sample("gpt_neox").folder)

    experts = _read(sample("qwen3_moe"))
    experts["num_experts"] = experts.pop("num_local_experts")
    assert read_spec(_write(tmp_path, experts)) == read_spec(sample("qwen3_moe").folder)


@pytest.mark.parametrize("variant", ["llama_linear", "llama_yarn", "gemma3"])
def test_both_spellings_that_agree_are_accepted(variant: str, sample: Callable[[str], Sample], tmp_path: Path) -> None:
    config = _read(sample(variant))
    both = _as_version_4(config) | {"rope_parameters": config["rope_parameters"]}
    assert read_spec(_write(tmp_path, both)) == read_spec(sample(variant).folder)


def test_minimax_is_read_in_the_spelling_of_the_publisher(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    config, spec = _read(sample("minimax")), read_spec(sample("minimax").folder)
    for part, name in (("full_attn", "full_attention"), ("linear_attn", "linear_attention"), ("mlp", "mlp")):
        for factor in ("alpha", "beta"):
            config[f"layernorm_{name}_{factor}"] = config.pop(f"{part}_{factor}_factor")
    del config["layer_types"]
    config |= {"architectures": ["MiniMaxText01ForCausalLM"], "model_type": "minimax_text_01", "postnorm": True}
    config |= {"attn_type_list": [0, 1, 0], "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid"}
    assert read_spec(_write(tmp_path, config)) == spec
    rotated = read_spec(_write(tmp_path, config | {"rotary_dim": 6})).layers[1].rope
    assert spec.layers[1].rope is not None
    assert rotated == replace(spec.layers[1].rope, rotary_dim=6)


def test_ids_of_other_tokens_and_a_repeated_size_change_no_result(
    sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    """As published configurations of Hunyuan have them."""
    config = _read(sample("hunyuan_v1_dense"))
    ids = {"text_start_id": 6, "text_end_id": 7, "im_newline_id": 11, "mask_init_id": 12, "eod_token_id": 3}
    repeated = _write(tmp_path, config | ids | {"attention_head_dim": config["head_dim"]})
    assert read_spec(repeated) == read_spec(sample("hunyuan_v1_dense").folder)
    with pytest.raises(ModelError, match="attention_head_dim"):
        read_spec(_write(tmp_path, config | {"attention_head_dim": config["head_dim"] + 2}))


def test_dtypes_are_read_in_the_spelling_of_torch(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    config = _as_version_4(_read(sample("llama")))
    assert read_spec(_write(tmp_path, config | {"torch_dtype": "torch.bfloat16"})).dtype == "bfloat16"


def test_windows_alternate_by_default(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    gemma2 = _read(sample("gemma2"))
    del gemma2["layer_types"]
    assert [layer.window for layer in read_spec(_write(tmp_path, gemma2)).layers] == [13, None, 13]
    gemma3 = _read(sample("gemma3"))
    del gemma3["layer_types"]
    gemma3["sliding_window_pattern"] = 2
    spec = read_spec(_write(tmp_path, gemma3))
    assert [layer.window for layer in spec.layers] == [13, None, 13]
    assert [layer.rope.theta for layer in spec.layers if layer.rope] == [5_000.0, 100_000.0, 5_000.0]


@pytest.mark.parametrize(
    ("variant", "change", "message"),
    [
        ("llama", {"a_new_switch": 3}, "a_new_switch: 3 is not implemented"),
        ("llama", {"sliding_window": 5}, "sliding_window: 5 is not implemented"),
        (
            "llama",
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config.quant_method: 'hqq' is not",
        ),
        ("llama", {"pretraining_tp": 2}, "pretraining_tp: 2 is not implemented"),
        ("llama", {"hidden_act": "quick_gelu"}, "hidden_act: 'quick_gelu' is not implemented"),
        ("llama", {"hidden_size": "48"}, "hidden_size: expected a positive integer"),
        ("llama", {"num_hidden_layers": 0}, "num_hidden_layers: expected a positive integer"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps: expected a number"),
        ("llama", {"dtype": "float64"}, "dtype: 'float64' is not implemented"),
        (
            "llama",
            {"architectures": ["XlnetForCausalLM"]},
            "architectures: 'XlnetForCausalLM' is not implemented; known",
        ),
        ("zamba2", {"use_long_context": True}, "use_long_context: True is not implemented"),
        ("zamba2", {"tie_word_embeddings": False}, "tie_word_embeddings: False is not implemented"),
        ("zamba2", {"use_conv_bias": False}, "use_conv_bias: False is not implemented"),
        ("zamba2", {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06 is not implemented"),
        ("zamba2", {"mamba_headdim": 10}, "mamba_headdim: 10 is not implemented; allowed: 12"),
        ("zamba2", {"attention_head_dim": 12}, "attention_head_dim: 12 is not implemented; allowed: 24"),
        ("zamba2", {"hybrid_layer_ids": [1]}, "hybrid_layer_ids: [1] is not implemented"),
        ("zamba2", {"layers_block_type": ["hybrid"]}, "layers_block_type: expected num_hidden_layers 6 times"),
        ("zamba2", {"n_mamba_heads": 7}, "n_mamba_heads: expected a divisor of 96"),
        ("minimax", {"postnorm": False}, "postnorm: False is not implemented"),
        ("minimax", {"shared_intermediate_size": 64}, "shared_intermediate_size: 64 is not implemented"),
        ("minimax", {"hidden_act": "gelu"}, "hidden_act: 'gelu' is not implemented"),
        ("minimax", {"layer_types": ["linear_attention"]}, "layer_types: expected num_hidden_layers 3 times"),
        ("minimax", {"rotary_dim": 14}, "rotary_dim: expected an even number up to head_dim 12"),
        ("llama", {"architectures": ["ZambaForCausalLM"]}, "its layers around state spaces are not computed here"),
        ("llama", {"architectures": None, "model_type": "rwkv"}, "architectures: expected a list"),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type 'spiral'"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "needs a factor"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 1}}, "twist is not implemented"),
        ("llama_dynamic", {"head_dim": 2}, "a lone pair cannot be rotated"),
        ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.1}}, "1 rotated elements of a head cannot be"),
        ("llama_linear", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not implemented here for"),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_parameters: contradicts rope_scaling"),
        ("llama_yarn", {"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "contradicts rope_scaling"),
        ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "contradicts rope_scaling"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention: True is not implemented"),
        ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layer_types: expected"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: True"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention: True is not implemented"),
        ("smollm3", {"no_rope_layers": [1, 2, 1]}, "no_rope_layers: expected 0 or 1 for each of 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers: expected 0 or 1 for each of 3 layers"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window: True is not implemented"),
    ],
)
def test_unimplemented_features_are_rejected_by_name(
    variant: str, change: Json, message: str, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    folder = _write(tmp_path, _read(sample(variant)) | change)
    with pytest.raises(ModelError) as refused:
        read_spec(folder)
    assert message in str(refused.value)
    assert str(folder / "config.json") in str(refused.value)


def _interpret(name: str, change: Json) -> ModelSpec:
    """Read the changed configuration of a variant or, with its architecture, of an encoder."""
    config = json.loads((VARIANTS | CONFIGS)[name]().to_json_string())
    return interpret(Config(config | change, Path("config.json")))[1]


ROPE = {"rope_type": "default", "rope_theta": 1e4}
ONE_KIND = {"rope_parameters": {"sliding_attention": ROPE}}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1e13}
GROUPED = {"n_group": 4, "topk_group": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("gemma3", ONE_KIND, "rope_parameters: expected 'full_attention' and 'sliding_attention', found ['sliding"),
        ("olmo3", ONE_KIND, "rope_parameters: expected 'full_attention' and 'sliding_attention', found ['sliding"),
        ("llama", ONE_KIND, "rope_parameters: a rope for each kind of layer is not implemented here"),
        ("gptj", {"rotary_dim": 7}, "rotary_dim: expected an even number up to n_embd / n_head 12, found 7"),
        ("hunyuan_v1_dense", {"rope_scaling": ALPHA}, "alpha: expected numbers up to 1e+12, found alpha 1e+13"),
        ("llama4", {"layer_types": ["x"]}, "layer_types: expected num_hidden_layers 4 times 'chunked_attention'"),
        ("llama4", {"moe_layers": ["1"]}, "moe_layers: expected a list of layers, found ['1']"),
        ("ministral3", {"rope_parameters": 3}, "rope_parameters: expected an object, found 3"),
        (
            "ministral3",
            {"rope_parameters": ROPE | {"llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta: expected a number above 0 with original_max_position_embeddings, found 0.1",
        ),
        ("deepseek_v2", {"qk_head_dim": 3}, "qk_head_dim: expected qk_nope_head_dim + qk_rope_head_dim"),
        ("deepseek_v3", GROUPED, "n_group: expected groups of two experts and more, found 4"),
        ("mistral3_multimodal", {"text_config": 3}, "text_config: expected an object, found 3"),
        (
            "Roberta",
            {"architectures": ["RobertaModel"], "max_position_embeddings": 2},
            "max_position_embeddings: expected more than 2, found 2",
        ),
        (
            "ModernBert",
            {"architectures": ["ModernBertModel"], "rope_parameters": {"linear_attention": ROPE}},
            "rope_parameters: expected 'full_attention' and 'sliding_attention', found ['linear_attention']",
        ),
    ],
)
def test_values_outside_a_family_are_rejected_by_name(name: str, change: Json, reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        _interpret(name, change)
    assert reason in str(refused.value)


def test_layers_by_default_and_by_letters() -> None:
    letters = _interpret("exaone4", {"layer_types": None, "sliding_window_pattern": "LG", "num_hidden_layers": 5})
    assert [layer.window is None for layer in letters.layers] == [False, True, False, True, True]
    plain = {"attn_temperature_tuning": False, "moe_layers": None, "interleave_moe_layer_step": 2}
    llama4 = _interpret("llama4", plain).layers
    assert [layer.moe is not None for layer in llama4] == [False, True] * (len(llama4) // 2)
    assert all(layer.query_scale is None for layer in llama4)
    ministral = _interpret("ministral3", {"rope_parameters": ROPE})
    assert all(layer.query_scale is None for layer in ministral.layers)
    greedy = _interpret("deepseek_v2", {"topk_method": "greedy"})
    assert {layer.moe.routing.n_groups for layer in greedy.layers if layer.moe} == {1}


@pytest.mark.parametrize(
    ("variant", "keys"),
    [
        ("gemma2", ("attn_logit_softcapping", "final_logit_softcapping")),
        ("deepseek_v3", ("routed_scaling_factor",)),
        ("gpt_oss", ("rope_parameters",)),
        ("apertus", ("rope_parameters",)),
    ],
)
def test_an_absent_key_has_the_default_of_transformers(variant: str, keys: tuple[str, ...]) -> None:
    made = VARIANTS[variant]()
    written, defaults = json.loads(made.to_json_string()), type(made)().to_dict()
    absent = {key: value for key, value in written.items() if key not in keys}

    def spec(values: Json) -> ModelSpec:
        return interpret(Config(values, Path("config.json")))[1]

    assert spec(absent) == spec(absent | {key: defaults[key] for key in keys}) != spec(written)


CLASSIFIER = {"architectures": ["BertForSequenceClassification"]}


@pytest.mark.parametrize(
    ("change", "function"),
    [
        ({"problem_type": "regression"}, "identity"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity"),
        ({"id2label": {"0": "yes"}}, "sigmoid"),
        ({}, "softmax"),
    ],
)
def test_the_function_of_a_classifiers_scores(change: Json, function: str) -> None:
    classifier = _interpret("Bert", CLASSIFIER | change).classifier
    assert classifier is not None
    assert classifier.function == function


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"id2label": {"0": "no", "2": "yes"}}, "id2label: expected labels of the numbers from 0 on, found {'0'"),
        ({"problem_type": "clustering"}, "problem_type: 'clustering' is not implemented"),
        (
            {"sentence_transformers": {"activation_fn": "torch.Tanh"}},
            "'torch.Tanh' is not implemented; known: torch.nn",
        ),
    ],
)
def test_a_classifier_that_is_not_implemented_is_refused_by_its_key(change: Json, reason: str) -> None:
    with pytest.raises(ModelError) as refused:
        _interpret("Bert", CLASSIFIER | change)
    assert reason in str(refused.value)


@pytest.mark.parametrize("text", [None, "{", "[]", pytest.param("[" * 100_000, id="deep")])
def test_a_broken_file_is_refused_by_name(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_spec(tmp_path)


def test_reading_a_spec_needs_no_torch(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    """Not even where the weights are quantized: the server process reads it."""
    _write(tmp_path, _read(sample("llama")) | {"quantization_config": {"quant_method": "fp8"}})
    code = (
        "import sys, pathlib; from services.compute.model.registry import read_spec; "
        f"assert read_spec(pathlib.Path({str(tmp_path)!r})).quantization; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
