"""Checkpoints stored in other ways than transformers writes them mean the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from services.compute.backends.collectives import SingleRank
from services.compute.backends.opening import open_backend
from services.compute.model.build import load_model
from services.compute.model.registry import describe, read_spec
from services.compute.model.spec import ModelError
from tests.unit.compute.model.conftest import Sample
from tests.unit.compute.model.formats.checkpoints import logits as sharded_logits
from tests.unit.compute.model.harness import CPU, CachedDecoder
from tests.unit.compute.model.zoo import prompt, reference_logits

Tensors = dict[str, torch.Tensor]


def _changed(folder: Path, to: Path, change: Callable[[Tensors], Tensors], **config: Any) -> Path:
    shutil.copytree(folder, to, dirs_exist_ok=True)
    values = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(values | config))
    tensors = change(load_file(to / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, to / "model.safetensors")
    return to


def _logits(folder: Path, ids: list[int]) -> torch.Tensor:
    model = load_model(describe(folder), SingleRank(), open_backend(torch.float32, CPU))
    return model.logits(CachedDecoder(model).run(ids, [30]))[:, :99]


def _body(tensors: Tensors) -> Tensors:
    """The tensors that AutoModel.save_pretrained stores."""
    prefixes = ("model.", "gpt_neox.", "transformer.")
    return {
        next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name): tensor
        for name, tensor in tensors.items()
    }


@pytest.mark.parametrize("variant", ["llama", "llama_tied_biased", "qwen2", "phi3", "gemma2", "gpt2", "gpt_neox"])
def test_names_without_the_prefix_of_the_body(variant: str, sample: Callable[[str], Sample], tmp_path: Path) -> None:
    expected = sample(variant)
    folder = _changed(expected.folder, tmp_path, _body)
    assert (_logits(folder, expected.ids) - expected.logits).abs().max() <= 1e-4


def test_a_body_without_a_head_embeds_and_does_not_generate(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    whole = sample("mistral")
    folder = _changed(
        whole.folder,
        tmp_path,
        lambda tensors: {name: tensor for name, tensor in _body(tensors).items() if name != "lm_head.weight"},
        architectures=["MistralModel"],
    )
    assert not read_spec(folder).generates
    assert read_spec(whole.folder).generates
    with torch.no_grad():
        reference = transformers.AutoModel.from_pretrained(folder)(torch.tensor([whole.ids])).last_hidden_state[0]
    model = load_model(describe(folder), SingleRank(), open_backend(torch.float32, CPU))
    assert (CachedDecoder(model).run(whole.ids, [30]) - reference).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", ["qwen2", "gpt2", "gpt_neox_serial"])
def test_a_stored_head_is_used_even_if_the_config_ties_the_head(
    variant: str, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    tied = sample(variant)
    name = "embed_out.weight" if variant.startswith("gpt_neox") else "lm_head.weight"
    embedding = {"qwen2": "model.embed_tokens", "gpt2": "transformer.wte"}.get(variant, "gpt_neox.embed_in")

    def with_head(tensors: Tensors) -> Tensors:
        return tensors | {name: torch.flip(tensors[f"{embedding}.weight"], (0,))}

    folder = _changed(tied.folder, tmp_path, with_head)
    reference = reference_logits(transformers.AutoModelForCausalLM.from_pretrained(folder), tied.ids)
    assert (reference - tied.logits).abs().max() > 0.1  # transformers also keeps the stored one
    assert (_logits(folder, tied.ids) - reference).abs().max() <= 1e-4


def test_unneeded_tensors_are_skipped(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    expected, extra = sample("llama"), torch.ones(2)
    names = [
        *("v_head.summary.weight", "model.layers.0.self_attn.k_scale", "model.layers.1.self_attn.attn.v_scale"),
        *("model.layers.0.self_attn.rotary_emb.cos_cached", "model.rotary_emb.inv_freq", "mtp.fc.weight"),
        "model.layers.2.self_attn.q_proj.weight",
    ]
    stored = {name: extra + index for index, name in enumerate(names)}
    folder = _changed(expected.folder, tmp_path, lambda tensors: tensors | stored, num_nextn_predict_layers=1)
    assert (_logits(folder, expected.ids) - expected.logits).abs().max() <= 1e-4


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight_scale", "model.layers.2.self_attn.x"])
def test_unknown_meaningful_tensors_are_rejected(name: str, sample: Callable[[str], Sample], tmp_path: Path) -> None:
    folder = _changed(sample("llama").folder, tmp_path, lambda tensors: tensors | {name: torch.ones(2)})
    with pytest.raises(ModelError, match=f"{name}: not used by this architecture"):
        load_model(describe(folder), SingleRank(), open_backend(torch.float32, CPU))


def test_gemma_1_with_gelu_is_computed_with_tanh(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    """Its first configurations say "gelu" and hidden_activation null."""
    made = sample("gemma")
    folder = _changed(made.folder, tmp_path, dict, hidden_act="gelu", hidden_activation=None)
    reference = reference_logits(transformers.AutoModelForCausalLM.from_pretrained(folder), made.ids)
    assert (_logits(folder, made.ids) - reference).abs().max() <= 1e-4
    assert read_spec(folder).activation == "gelu_tanh"


def test_learned_positions_shrink_to_the_served_length(sample: Callable[[str], Sample]) -> None:
    made, ids = sample("gpt2"), prompt(30)
    model = load_model(describe(made.folder), SingleRank(), open_backend(torch.float32, CPU), max_positions=32)
    assert (model.logits(CachedDecoder(model).run(ids, []))[:, :99] - made.logits[:30]).abs().max() <= 1e-4
    with pytest.raises(ModelError, match="the model was made for 128"):
        load_model(describe(made.folder), SingleRank(), open_backend(torch.float32, CPU), max_positions=129)


@pytest.mark.parametrize(
    "variant",
    [
        *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2", "olmo2"),
        *("granite", "smollm3", "phi3"),
    ],
)
def test_heads_are_rotated_in_part_only_where_transformers_does(
    variant: str, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    """Most families rotate whole heads, whatever `partial_rotary_factor` says."""
    made = sample(variant)
    folder = _changed(made.folder, tmp_path, dict, partial_rotary_factor=0.5)
    reference = reference_logits(transformers.AutoModelForCausalLM.from_pretrained(folder), made.ids)
    assert (_logits(folder, made.ids) - reference).abs().max() <= 1e-4


@pytest.mark.parametrize("variant", ["mixtral", "qwen3_moe"])
def test_experts_in_a_single_tensor_equal_transformers_5(
    variant: str, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    made, folder = sample(variant), tmp_path / "stacked"
    shutil.copytree(made.folder, folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    model.save_pretrained(folder, save_original_format=False)
    names = load_file(folder / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    for size in (1, 2):
        assert (sharded_logits(replace(made, folder=folder), size) - made.logits).abs().max() <= 1e-4
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_local_experts": 10**6}))
    with pytest.raises(ModelError, match=r"num_local_experts: 1000000, but 4 experts are stored in layer 0"):
        _logits(folder, made.ids)
    key = "moe_intermediate_size" if variant == "qwen3_moe" else "intermediate_size"
    (folder / "config.json").write_text(json.dumps(config | {key: 40}))
    message = rf"experts\.gate_up_proj: expected shape \[4, 80, 48\], found \[4, \d+, 48\]; {key} \(40\) of config"
    with pytest.raises(ModelError, match=message):
        _logits(folder, made.ids)


def test_experts_that_are_stored_in_out_equal_transformers(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    """transformers 4 stored those of Qwen 3 VL so."""
    made = sample("qwen3_vl_moe_multimodal")
    names = [name for name in load_file(made.folder / "model.safetensors") if ".experts." in name]
    assert len(names) == 4

    def turn(tensors: Tensors) -> Tensors:
        return tensors | {name: tensors[name].mT for name in names}

    folder = _changed(made.folder, tmp_path, turn)
    for size in (1, 2):
        assert (sharded_logits(replace(made, folder=folder), size) - made.logits).abs().max() <= 1e-4


@pytest.mark.parametrize(
    "variant", ["gemma3_multimodal", "mistral3_multimodal", "qwen2_5_vl_multimodal", "qwen3_vl_multimodal"]
)
def test_the_text_model_of_a_multimodal_model_is_found_in_the_layouts_of_transformers_4_and_5(
    variant: str, sample: Callable[[str], Sample], tmp_path: Path
) -> None:
    made = sample(variant)
    assert "vision tower" in read_spec(made.folder).left_out
    names = ({"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}, {})
    if variant.startswith("qwen2"):
        names = ({"model.language_model.": "model.", "model.visual.": "visual."}, {})
    for number, renamed in enumerate(names):
        folder = _changed(made.folder, tmp_path / str(number), lambda tensors, of=renamed: _placed(tensors, of))
        assert (_logits(folder, made.ids) - made.logits).abs().max() <= 1e-4


def _placed(tensors: Tensors, prefixes: dict[str, str]) -> Tensors:
    """The names of transformers 5 with other prefixes."""
    new = {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
        "model.layers.": "model.language_model.layers.",
        "model.embed_tokens.": "model.language_model.embed_tokens.",
        "model.norm.": "model.language_model.norm.",
    }
    for table in (new, prefixes):
        tensors = {
            next((to + name.removeprefix(old) for old, to in table.items() if name.startswith(old)), name): tensor
            for name, tensor in tensors.items()
        }
    return tensors


def test_weights_that_are_not_finite_are_refused_by_name(sample: Callable[[str], Sample], tmp_path: Path) -> None:
    def spoil(tensors: Tensors) -> Tensors:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
        return tensors

    with pytest.raises(ModelError, match=r"model\.safetensors: model\.layers\.1\.mlp\.up_proj: holds nan"):
        _logits(_changed(sample("llama").folder, tmp_path, spoil), prompt())
