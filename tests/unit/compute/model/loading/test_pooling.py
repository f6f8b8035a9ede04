"""A checkpoint's own pooling is obeyed, and any other one refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from services.compute.model.formats.gguf.metadata import GgufMetadata, Value
from services.compute.model.layers.head import load_dense
from services.compute.model.loading.folder import open_folder
from services.compute.model.loading.pooling import (
    EmbeddingFiles,
    Pooling,
    PoolingKind,
    read_gguf_pooling,
)
from services.compute.model.spec import ModelError
from services.worker.rank.pooling import PooledSlots

Json = dict[str, Any]
HIDDEN = torch.arange(12.0).view(4, 3) + 1


def _write(folder: Path, modules: list[str] | None, pooling: dict[str, Any] | None) -> Path:
    if modules is not None:
        listed = [
            {"idx": i, "path": f"{i}_{name}" if i else "", "type": f"sentence_transformers.models.{name}"}
            for i, name in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 3, **pooling}))
    return folder


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        (None, None, Pooling("mean", True)),
        (["Transformer", "Pooling"], {"pooling_mode_mean_tokens": True}, Pooling("mean", False)),
        (
            ["Transformer", "Pooling", "Normalize"],
            {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True, "include_prompt": True},
            Pooling("last", True),
        ),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True}, Pooling("cls", False)),
        (None, {"pooling_mode": "lasttoken"}, Pooling("last", True)),
        (["Transformer", "Pooling", "Dropout"], {"pooling_mode_mean_tokens": False}, Pooling("mean", False)),
    ],
)
def test_stored_pooling_is_used(
    modules: list[str] | None, pooling: dict[str, Any] | None, expected: Pooling, tmp_path: Path
) -> None:
    assert open_folder(_write(tmp_path, modules, pooling), vocab_size=1).pooling == expected


@pytest.mark.parametrize(
    ("modules", "pooling", "message"),
    [
        (None, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens is not implemented"),
        (None, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, r"cls_token \+ pooling_mode_mean"),
        (None, {"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt: False is not"),
        (["Transformer", "Pooling", "LSTM"], None, "module 'LSTM' is not implemented"),
        (["Transformer", "Pooling", "Normalize", "Dense"], None, "expected modules in the order"),
        (["Transformer", "Pooling"], None, "config.json: missing or empty, but modules.json lists a pooling"),
        (["Transformer", "Normalize"], None, "modules without Pooling are not implemented"),
        (["Pooling", "Transformer"], {}, "Transformer: path: '1_Transformer' is not implemented; allowed: ''"),
        (["Transformer", "Pooling", "Dense"], {}, "in_features: expected a positive integer, found None"),
    ],
)
def test_unsupported_pooling_is_rejected(
    modules: list[str] | None, pooling: dict[str, Any] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=message):
        _ = open_folder(_write(tmp_path, modules, pooling), vocab_size=1).pooling


@pytest.mark.parametrize(("kind", "expected"), [("mean", HIDDEN.mean(dim=0)), ("cls", HIDDEN[0]), ("last", HIDDEN[-1])])
def test_pools_of_chunks(kind: PoolingKind, expected: torch.Tensor) -> None:
    for normalise in (False, True):
        pools = PooledSlots(Pooling(kind, normalise))
        pools.admit(5)
        pools.add(5, 0, HIDDEN[:1])
        pools.add(5, 1, HIDDEN[1:])
        wanted = expected / expected.norm() if normalise else expected
        with pytest.raises(ValueError, match="its chunk starts at 1 but 4 positions were summed"):
            pools.add(5, 1, HIDDEN[1:])
        assert pools.result(5) == pytest.approx(wanted.tolist())


def test_dense_modules_follow_the_pooling(tmp_path: Path) -> None:
    """As EmbeddingGemma has two of them."""
    folder = _write(tmp_path, ["Transformer", "Pooling", "Dense", "Dense", "Normalize"], {"pooling_mode": "mean"})
    generator = torch.Generator().manual_seed(0)
    expected = HIDDEN.mean(dim=0)
    for index, (n_in, n_out, activation) in enumerate(((3, 5, "activation.Tanh"), (5, 4, "linear.Identity")), start=2):
        place = folder / f"{index}_Dense"
        place.mkdir()
        settings = {"in_features": n_in, "out_features": n_out, "bias": index == 2}
        settings |= {"activation_function": f"torch.nn.modules.{activation}"}
        (place / "config.json").write_text(json.dumps(settings))
        tensors = {"linear.weight": torch.randn(n_out, n_in, generator=generator)}
        if index == 2:
            tensors["linear.bias"] = torch.randn(n_out, generator=generator)
        save_file(tensors, place / "model.safetensors")
        expected = torch.nn.functional.linear(expected, tensors["linear.weight"], tensors.get("linear.bias"))
        expected = expected.tanh() if index == 2 else expected
    pooling = open_folder(folder, vocab_size=1).pooling
    pools = PooledSlots(pooling, load_dense(folder, pooling.dense, 3, torch.device("cpu")))
    pools.admit(0)
    pools.add(0, 0, HIDDEN)
    assert pools.result(0) == pytest.approx((expected / expected.norm()).tolist(), abs=1e-6)
    with pytest.raises(ModelError, match="in_features: expected 7, found 3"):
        load_dense(folder, pooling.dense, 7, torch.device("cpu"))
    (folder / "2_Dense" / "config.json").write_text('{"activation_function": "torch.nn.GELU"}')
    with pytest.raises(ModelError, match=r"activation_function: 'torch.nn.GELU' is not implemented; known: torch.nn"):
        _ = open_folder(folder, vocab_size=1).pooling


@pytest.mark.parametrize(
    ("module", "change"),
    [
        ("Dense", {"use_residual": True}),
        ("Dense", {"module_input_name": "token_embeddings"}),
        ("Normalize", {"module_output_name": "token_embeddings"}),
    ],
)
def test_a_module_with_another_input_or_product_is_refused(module: str, change: Json, tmp_path: Path) -> None:
    folder = _write(tmp_path, ["Transformer", "Pooling", module], {})
    file = folder / f"2_{module}" / "config.json"
    file.parent.mkdir()
    settings: Json = {"in_features": 3, "out_features": 3, "use_residual": False, "module_input_name": None}
    file.write_text(json.dumps(settings))
    assert open_folder(folder, vocab_size=1).pooling.kind == "mean"
    file.write_text(json.dumps(settings | change))
    with pytest.raises(ModelError, match=f"{next(iter(change))}: .* is not implemented; allowed: "):
        _ = open_folder(folder, vocab_size=1).pooling
    modules = folder / "modules.json"
    modules.write_text(modules.read_text().replace(f"sentence_transformers.models.{module}", f"pylate.models.{module}"))
    with pytest.raises(ModelError, match=f"module 'pylate.models.{module}' is not implemented"):
        _ = open_folder(folder, vocab_size=1).pooling


def test_the_pooling_of_a_gguf_file() -> None:
    values: dict[str, Value] = {"general.architecture": "bert", "bert.pooling_type": 2}
    assert read_gguf_pooling(GgufMetadata(Path("m.gguf"), values)).kind == "cls"
    with pytest.raises(ModelError, match=r"bert.pooling_type: pooling 9 is not implemented; known: 0, 1"):
        read_gguf_pooling(GgufMetadata(Path("m.gguf"), values | {"bert.pooling_type": 9}))


def test_prompts_and_the_longest_text_are_read(tmp_path: Path) -> None:
    limits, named = tmp_path / "sentence_bert_config.json", tmp_path / "config_sentence_transformers.json"
    assert open_folder(tmp_path, vocab_size=1).embedding == EmbeddingFiles()
    limits.write_text('{"max_seq_length": 256, "do_lower_case": false}')
    named.write_text('{"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"}')
    assert open_folder(tmp_path, vocab_size=1).embedding == EmbeddingFiles(
        256, {"query": "Q: ", "document": ""}, "query"
    )
    named.write_text('{"prompts": {"query": null, "document": ""}, "default_prompt_name": "query"}')
    assert open_folder(tmp_path, vocab_size=1).embedding == EmbeddingFiles(256, {"document": ""})
    limits.rename(tmp_path / "sentence_roberta_config.json")
    assert open_folder(tmp_path, vocab_size=1).embedding.max_tokens == 256
    limits.write_text('{"max_seq_length": 256, "processor_kwargs": {"model_max_length": 128}}')
    assert open_folder(tmp_path, vocab_size=1).embedding.max_tokens == 128
    for file, text, says in (
        (limits, '{"max_seq_length": 0}', "max_seq_length: expected a positive integer, found 0"),
        (limits, '{"do_lower_case": true}', "do_lower_case: True is not implemented"),
        (named, '{"prompts": {}, "default_prompt_name": "query"}', "'query' is none of no prompts"),
        (named, '{"prompts": ["Q: "]}', r"prompts: expected texts by their names, found \['Q: '\]"),
    ):
        before = file.read_text()
        file.write_text(text)
        with pytest.raises(ModelError, match=says):
            _ = open_folder(tmp_path, vocab_size=1).embedding
        file.write_text(before)


@pytest.mark.parametrize(
    ("stored", "expected"), [(512, 512), (1e30, None), (10**30, None), (None, None), ("512", None)]
)
def test_without_a_limit_of_its_own_a_sentence_model_has_its_tokenizer_s(
    stored: object, expected: int | None, tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": stored}))
    assert open_folder(tmp_path, vocab_size=1).embedding.max_tokens is None  # no model of sentence-transformers
    (tmp_path / "modules.json").write_text("[]")
    (tmp_path / "sentence_bert_config.json").write_text('{"transformer_task": "feature-extraction"}')
    assert open_folder(tmp_path, vocab_size=1).embedding.max_tokens == expected
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 100}')
    assert open_folder(tmp_path, vocab_size=1).embedding.max_tokens == 100


def test_embeddings_are_cut_as_the_model_says(tmp_path: Path) -> None:
    """After they were scaled, as sentence-transformers does."""
    file = tmp_path / "config_sentence_transformers.json"
    file.write_text('{"truncate_dim": 2}')
    pooling = open_folder(tmp_path, vocab_size=1).pooling
    assert pooling == Pooling("mean", True, size=2)
    pools = PooledSlots(pooling)
    pools.admit(0)
    pools.add(0, 0, torch.tensor([[3.0, 0.0, 4.0]]))
    assert pools.result(0) == pytest.approx((0.6, 0.0))
    file.write_text('{"truncate_dim": 0}')
    with pytest.raises(ModelError, match="truncate_dim: expected a positive integer, found 0"):
        _ = open_folder(tmp_path, vocab_size=1).pooling
